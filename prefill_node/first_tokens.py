"""The first tokens of the prompts that end in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.sampling import Sampled, SampleRow, SamplingError, sample
from engine.sampling_params import SamplingParams
from prefill_node.steps import Chunk


def sample_first_tokens(
    chunks: Sequence[Chunk], logits: Tensor, params: Mapping[str, SamplingParams]
) -> tuple[dict[str, Sampled], dict[str, str]]:
    """First tokens by request id, and why some requests have none. Equal on every rank.

    Args:
        chunks: those which end their prompt, [S].
        logits: [S, vocab] float32.
        params: by request id, of those to be sampled; the others are left out.
    """
    left = [index for index, chunk in enumerate(chunks) if chunk.request_id in params]
    failures: dict[str, str] = {}
    while left:
        rows = [
            SampleRow(chunk.request_id, params[chunk.request_id], chunk.prompt_tokens)
            for chunk in (chunks[index] for index in left)
        ]
        try:
            sampled = sample(logits[left], rows)
        except SamplingError as error:
            failures.update(dict.fromkeys(error.request_ids, str(error)))
            left = [index for index in left if chunks[index].request_id not in failures]
            continue
        return {row.request_id: token for row, token in zip(rows, sampled, strict=True)}, failures
    return {}, failures
