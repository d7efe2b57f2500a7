"""The decoder computes what transformers computes, for both families and every variant of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.passkey import make_prompt
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.loader import load_weights
from engine.tokenizer import Tokenizer
from tests.checkpoints import (
    PASSKEY_GLM,
    YARN,
    passkey_as_deepseek,
    passkey_with_shared_index,
    random_checkpoint,
)
from tests.model.dense_backend import DenseBackend
from tests.model.runner import Runner, random_prompt
from tests.oracle import Oracle, assert_tokens_match

LENGTHS = (1, 2, 63, 64, 65, 300)  # index_topk is 64

VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "deepseek": ("deepseek_v32", 8, {}),
    "deepseek-yarn": ("deepseek_v32", 5, {"rope_parameters": YARN}),
    "deepseek-tied": ("deepseek_v32", 4, {"tie_word_embeddings": True, "norm_topk_prob": False}),
    "glm": ("glm_moe_dsa", 0, {}),
    "glm-shared-index": ("glm_moe_dsa", 0, {"indexer_types": ["full", "shared", "full", "shared"]}),
}
"""Family, seed of the weights, and what differs from the plain tiny model.

With these seeds and the prompts below no token's 64th and 65th index scores are closer than 1e-5. Where they are
within rounding (some 1e-6), two correct programs may select different rows, and logits differ visibly.
"""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, seed, overrides = VARIANTS[request.param]
    return random_checkpoint(tmp_path_factory.mktemp(request.param), model_type, seed, **overrides)


def test_greedy_tokens_equal_the_oracle_at_every_length(checkpoint: Path) -> None:
    runner, oracle = Runner(checkpoint), Oracle(checkpoint)
    for length in LENGTHS:
        prompt = random_prompt(length)
        assert_tokens_match(runner.greedy(prompt, 12), oracle.greedy(prompt, 12))
    assert runner.margin > 1e-5, "choose another seed: index scores tie, so the comparison above proves little"


def test_logits_of_all_positions_are_close_to_the_oracle(checkpoint: Path) -> None:
    prompt = random_prompt(200)
    torch.testing.assert_close(Runner(checkpoint).logits(prompt), Oracle(checkpoint).logits(prompt), atol=2e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_does_not_change_logits(checkpoint: Path, chunk: int) -> None:
    runner, prompt = Runner(checkpoint), random_prompt(100)
    torch.testing.assert_close(runner.logits(prompt, chunk), runner.logits(prompt), atol=2e-4, rtol=0)


def test_tokens_do_not_depend_on_the_other_requests_of_the_step(checkpoint: Path) -> None:
    """Prompts of all lengths run together, so that steps mix prefill chunks and decode tokens."""
    prompts = {str(length): random_prompt(length) for length in LENGTHS}
    together = Runner(checkpoint).greedy_batch(prompts, 10, chunk=40)
    oracle = Oracle(checkpoint)
    for name, prompt in prompts.items():
        assert_tokens_match(together[name], oracle.greedy(prompt, 10))


def test_select_returns_the_logits_of_these_rows_in_this_order(tmp_path: Path) -> None:
    runner = Runner(random_checkpoint(tmp_path, "glm_moe_dsa"))
    tokens, positions = torch.tensor(random_prompt(5)), torch.arange(5)

    def run(select: torch.Tensor | None) -> torch.Tensor:
        backend = DenseBackend(runner.config)
        backend.begin([("a", 5)])
        return runner.decoder.forward(tokens, positions, backend, select)

    chosen = run(torch.tensor([4, 1]))
    assert chosen.dtype == torch.float32
    torch.testing.assert_close(chosen, run(None)[[4, 1]], atol=1e-5, rtol=0)


def test_shared_layers_get_no_indexer_query(tmp_path: Path) -> None:
    types = ["full", "shared", "shared", "full"]
    runner = Runner(random_checkpoint(tmp_path, "glm_moe_dsa", indexer_types=types))
    seen: list[str] = []

    class Spy(DenseBackend):
        def attend(self, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append("shared" if kwargs["indexer"] is None else "full")
            return super().attend(layer, *args, **kwargs)

    backend = Spy(runner.config)
    backend.begin([("a", 3)])
    runner.decoder.forward(torch.tensor([5, 6, 7]), torch.arange(3), backend)
    assert seen == types


PASSKEY_LAYOUTS = {"glm": None, "deepseek": passkey_as_deepseek, "shared-index": passkey_with_shared_index}


@pytest.fixture(scope="module", params=PASSKEY_LAYOUTS)
def passkey(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    derive = PASSKEY_LAYOUTS[request.param]
    return derive(tmp_path_factory.mktemp(request.param)) if derive else PASSKEY_GLM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passkeys_are_found_at_every_depth(passkey: Path, dtype: torch.dtype) -> None:
    runner, tokenizer = Runner(passkey, dtype), Tokenizer.from_dir(passkey)
    assert tokenizer is not None
    for seed, depth in enumerate((0.0, 0.35, 0.7, 1.0)):
        prompt, key = make_prompt(600, depth, seed)
        answer = tokenizer.decode(runner.greedy(tokenizer.encode(prompt), 12))
        assert key in answer, f"depth {depth}: {answer!r} lacks {key}"


def test_passkey_layouts_equal_the_oracle(passkey: Path) -> None:
    tokenizer = Tokenizer.from_dir(passkey)
    assert tokenizer is not None
    prompt = tokenizer.encode(make_prompt(700, 0.5, seed=9)[0])
    assert_tokens_match(Runner(passkey).greedy(prompt, 12), Oracle(passkey).greedy(prompt, 12))


def test_wrong_indexer_rope_loses_the_passkey(tmp_path: Path) -> None:
    """The check above can fail: with the other family's indexer rope the keys are not found."""
    passkey_as_deepseek(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"indexer_rope_interleave": false', '"indexer_rope_interleave": true'))
    runner, tokenizer = Runner(tmp_path), Tokenizer.from_dir(tmp_path)
    assert runner.config.indexer_rope_interleave
    assert tokenizer is not None
    prompt, key = make_prompt(600, 0.35, seed=1)
    assert key not in tokenizer.decode(runner.greedy(tokenizer.encode(prompt), 12))


def test_long_steps_do_not_need_memory_for_every_expert(tmp_path: Path) -> None:
    """8192 rows through 64 experts: all-experts-on-all-rows would take 8192 x 64 x 256 floats (512 MiB) per layer."""
    overrides = {"n_routed_experts": 64, "moe_intermediate_size": 256, "num_hidden_layers": 2, "n_group": 1}
    checkpoint = random_checkpoint(tmp_path, "glm_moe_dsa", **overrides)
    config = ModelConfig.from_dir(checkpoint)
    decoder = DsaDecoder(config, load_weights(checkpoint, config, torch.float32), None, torch.float32)

    class Local:
        """Every token attends to itself only, so that the decoder's own memory is what counts."""

        def attend(
            self,
            layer: int,
            q_nope: torch.Tensor,
            q_rope: torch.Tensor,
            ckv: torch.Tensor,
            k_rope: torch.Tensor,
            indexer: IndexerQuery | None,
        ) -> torch.Tensor:
            return ckv[:, None].expand(-1, q_nope.shape[1], -1).contiguous()

    tokens = torch.arange(8192) % config.vocab_size
    largest = _largest_allocation(lambda: decoder.forward(tokens, torch.arange(8192), Local(), torch.tensor([8191])))
    assert largest < 64 * 2**20


def _largest_allocation(work: Callable[[], object]) -> int:
    """Most bytes that any single operator of `work` allocated."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    return max(int(event.cpu_memory_usage) for event in profiler.events())
