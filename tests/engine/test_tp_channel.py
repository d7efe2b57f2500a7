"""Followers see every command once and in order; a missing follower is an error with its rank."""

import time
from pathlib import Path

import pytest

from engine.tp_channel import ChannelError, TpFollower, TpLeader


def test_commands_arrive_in_order_and_reports_come_back(tmp_path: Path) -> None:
    leader = TpLeader(tmp_path, "decode-0", 3)
    followers = [TpFollower(tmp_path, "decode-0", rank) for rank in (1, 2)]
    for follower in followers:
        follower.ready()
    leader.wait_ready(5.0)
    for number in range(20):
        leader.broadcast(("step", number))
    for follower in followers:
        assert [follower.next_command(5.0) for _ in range(20)] == [("step", n) for n in range(20)]
        assert follower.next_command(0.0) is None
        follower.report({"done": True})
    seen = []
    while len(seen) < 2:
        seen += leader.reports()
    assert sorted(seen) == [(1, {"done": True}), (2, {"done": True})]
    for end in (*followers, leader):
        end.close()


def test_a_missing_follower_is_named(tmp_path: Path) -> None:
    leader = TpLeader(tmp_path, "prefill-0", 3)
    follower = TpFollower(tmp_path, "prefill-0", 2)
    follower.ready()
    with pytest.raises(ChannelError, match=r"prefill-0: ranks \[1\] did not start"):
        leader.wait_ready(0.5)
    follower.close()
    leader.close()


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_is_gone_is_noticed_by_an_idle_group(tmp_path: Path, gone: int) -> None:
    """A socket closes as it does when its process is killed; but a group that stops may take a moment for it."""
    leader = TpLeader(tmp_path, "decode-0", 3)
    followers = [TpFollower(tmp_path, "decode-0", rank) for rank in (1, 2)]
    for follower in followers:
        follower.ready()
    leader.wait_ready(5.0)
    (leader if gone == 0 else followers[1]).close()
    closed = time.monotonic()
    text = "TP rank 0 is gone" if gone == 0 else r"TP ranks \[2\] are gone"
    with pytest.raises(ChannelError, match=text):
        while time.monotonic() < closed + 10:
            assert (followers[0].next_command(0.05) if gone == 0 else leader.reports() or None) is None
    assert 0.5 < time.monotonic() - closed < 5
    for end in (*followers, leader):
        end.close()


def test_a_group_of_one_needs_no_sockets(tmp_path: Path) -> None:
    leader = TpLeader(tmp_path, "decode-0", 1)
    leader.wait_ready(0.0)
    leader.broadcast("nothing")
    assert leader.reports() == []
    leader.close()
    assert list(tmp_path.iterdir()) == []


def test_a_long_run_dir_is_refused_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match=r"runtime\.run_dir = .* is too long"):
        TpLeader(tmp_path / ("x" * 100), "decode-0", 2)
