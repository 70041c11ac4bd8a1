"""Control codes, bars, wraps and prefixes: what a person sees, line by line."""

from __future__ import annotations

import pytest

from dflash_ops.triage.clean import clean, unglue, without_copy_mode_mark
from dflash_ops.triage.match import Matcher
from dflash_ops.triage.playbook import compile_playbooks
from dflash_ops.triage.prefix import Learned, peel, strip_compose
from dflash_ops.triage.types import Line
from dflash_ops.triage.wraps import Width, join


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"\x1b[1;31mOSError\x1b[0m: no \x1b[38;5;12mspace\x1b[m", ["OSError: no space"]),
        (b"\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", ["textlink"]),
        (b"ab\x08\x08cd", ["cd"]),
        (b"a\x00b\x00", ["ab"]),
        (b"a\xff\xfeb", ["a\ufffd\ufffdb"]),
        (b"left\x1b[6Cright", ["left      right"]),
        (b"", [""]),
        (b"text\r\n", ["text"]),
    ],
)
def test_control_codes_go_and_text_stays(raw: bytes, lines: list[str]) -> None:
    assert clean(raw) == lines


def test_of_a_bar_drawn_with_carriage_returns_the_last_state_stays() -> None:
    states = b"".join(b"\r 4%d%%|##   | 4%d/100 [00:1%d<00:12, 4.4it/s]" % (i, i, i) for i in range(5))
    assert clean(states) == [" 44%|##   | 44/100 [00:14<00:12, 4.4it/s]"]


def test_text_between_bar_states_is_kept() -> None:
    raw = b"\r 1%|# | 1/100 [00:01<00:12, 4.4it/s]\rOSError: no space\r 2%|# | 2/100 [00:02<00:12, 4.4it/s]"
    assert clean(raw)[1] == "OSError: no space"
    assert len(clean(raw)) == 3


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (
            "Epoch 0:   6%|█  | 320/500 [6:28<94:39,  1.37it/s, loss=2.6][rank1]:[E131 16:15:16.6 P.cpp:616] x",
            "[rank1]:[E131 16:15:16.6 P.cpp:616] x",
        ),
        ("Loading:  57% 4/7 [00:40<00:29,  9.96s/it]ERROR:torch.x:failed", "ERROR:torch.x:failed"),
        ("2.16it/s]Exception ignored in: <function f>", "Exception ignored in: <function f>"),
        ("a line of a pane" + " " * 40 + "Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_text_glued_to_a_bar_or_by_padding_is_a_line_of_its_own(text: str, rest: str) -> None:
    assert unglue(text)[-1] == rest
    assert len(unglue(text)) == 2


def test_values_behind_a_bar_are_part_of_it() -> None:
    bar = "Epoch 1:  12%|███▏      | 120/1000 [00:10<01:30,  9.9it/s], loss=2.1"
    assert unglue(bar) == [bar]


def test_tmuxs_copy_mode_mark_is_taken_off() -> None:
    assert without_copy_mode_mark("some text of the pane      [12/340]") == "some text of the pane"
    assert without_copy_mode_mark("torch._dynamo [2/8] limit") == "torch._dynamo [2/8] limit"


# --- wraps -----------------------------------------------------------------------------------------------------------

_NOTHING = Matcher(compile_playbooks([]))
TRACE = """\
Traceback (most recent call last):
  File "/root/work/experiments/dflash/model/drafter_layers.py", line 760, in forward_with_noise
    noise_embedding = self.layers[index].forward(noise_embedding, context, rotary, block_mask)
  File "/root/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1779, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. This is not supported.
"""


def wrapped(text: str, width: int) -> list[str]:
    return [line[at : at + width] for line in text.splitlines() for at in range(0, max(1, len(line)), width)]


def joined(lines: list[str], matcher: Matcher = _NOTHING) -> list[str]:
    return [
        line.text for line in join([Line(i + 1, t) for i, t in enumerate(lines)], matcher.spans_literal, matcher.knows)
    ]


@pytest.mark.parametrize("width", [60, 72, 80, 97, 100])
def test_hard_wraps_at_any_width_are_joined(width: int) -> None:
    assert joined(wrapped(TRACE, width)) == TRACE.splitlines()


def test_a_frame_cut_by_a_wrap_is_joined_without_any_other_evidence() -> None:
    lines = [
        '  File "/root/work/a_rather_long_path/drafter.py", lin',
        "e 760, in forward",
        "    x = f(x)",
        "ValueError: no",
    ]
    assert joined(lines)[0] == '  File "/root/work/a_rather_long_path/drafter.py", line 760, in forward'


def test_lines_of_one_length_that_begin_alike_are_no_wraps() -> None:
    steps = [f"iter {n:05d}: loss 2.{n % 10}411, time 311.20ms, mfu 41.2{n % 10}%" for n in range(60)]
    assert joined(steps) == steps


def test_two_ordinary_lines_stay_two() -> None:
    for lines in (
        ["Sep 14 03:02:11 pve1 kernel: NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.148.08", "-- Boot 4fd0 --"],
        ["the longest line of a short text ends with a full stop.", "another sentence"],
        ['  File "/root/work/draft_model.py", line 402', "    def forward(self, hidden, mask", "SyntaxError: '('"],
        TRACE.splitlines(),
    ):
        assert joined(lines) == lines


def test_a_known_text_across_a_border_joins_it() -> None:
    kind = {
        "id": "k",
        "title": "t",
        "role": "root",
        "grade": "N",
        "signature": [{"literal": "no space left on any device"}],
    }
    matcher = Matcher(compile_playbooks([{"schema": 1, "family": "f", "kind": [kind]}]))
    lines = ["OSError: while the checkpoint was written: No sp", "x"]
    assert joined(["OSError: while the checkpoint was written: no spa", "ce left on any device, at all"], matcher) == [
        "OSError: while the checkpoint was written: no space left on any device, at all"
    ]
    assert len(joined(lines, matcher)) == 2


def test_the_width_is_named_only_where_the_text_shows_it() -> None:
    assert Width(wrapped(TRACE, 80)).columns == 80
    assert Width(TRACE.splitlines()).columns == 0


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "body", "rank", "stream"),
    [
        ("[rank3]: ValueError: x", "ValueError: x", 3, "rank3"),
        ("[rank3]:   File", "  File", 3, "rank3"),
        ("[default0]:step 3", "step 3", 0, "rank0"),
        ("[target1]: text", "text", 1, "target1"),
        ("(RayTrainWorker pid=123, ip=192.0.2.7) text", "text", None, "RayTrainWorker 123"),
        ("[1,7]<stderr>:text", "text", 7, "rank7"),
        ('4:   File "a.py", line 3, in f', '  File "a.py", line 3, in f', 4, "rank4"),
        ("2026-11-29T16:24:18.123456789Z text", "text", None, ""),
        ("[2026-11-29 16:24:18,123] text", "text", None, ""),
        ("2026-11-29T16:24:18Z [rank3]: [E1129 16:20:11.123 P.cpp:632] [Rank 3] text", "text", 3, "rank3"),
        ("E1129 16:20:12.000 912 torch/x.py:1003] text", "text", None, ""),
        ("[rank6]:[E429 13:55:49.38 P.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] text", "text", 6, "rank6"),
        ("ERROR:torch.distributed.elastic:text", "text", None, ""),
        ("[74785.660366] NVRM: Xid", "NVRM: Xid", None, ""),
        ("May 15 23:09:30 box kernel: [  518.05] text", "[  518.05] text", None, ""),
        ("plain text: 3", "plain text: 3", None, ""),
    ],
)
def test_prefixes_come_off_and_are_remembered(text: str, body: str, rank: int | None, stream: str) -> None:
    line = Line(1, text)
    peel(line)
    assert (line.body, line.rank, line.stream) == (body, rank, stream)


def test_kernel_lines_and_levels_are_known_by_their_prefix() -> None:
    kernel, error = Line(1, "[Sun Nov 29 16:24:18 2026] NVRM: Xid"), Line(2, "[E1129 16:20:11.123 P.cpp:632] x")
    for line in (kernel, error):
        peel(line)
    assert (kernel.kernel, error.level) == (True, "E")


def test_composes_names_come_off_where_most_lines_have_them() -> None:
    lines = [Line(i, t) for i, t in enumerate(("trainer-1  | a", "trainer-1  | b", "redis-1    | c"))]
    strip_compose(lines)
    assert [(line.stream, line.body) for line in lines] == [("trainer-1", "a"), ("trainer-1", "b"), ("redis-1", "c")]
    alone = [Line(i, t) for i, t in enumerate(("loss 3 | a", "b", "c", "d", "e"))]
    strip_compose(alone)
    assert alone[0].body == "loss 3 | a"


def test_a_learned_prefix_holds_for_other_digits() -> None:
    learned = Learned()
    learned.learn("<job 12/pid 33> Traceback (most recent call last):")
    line = Line(2, "<job 13/pid 4>   File")
    learned.strip(line)
    assert line.body == "  File"
