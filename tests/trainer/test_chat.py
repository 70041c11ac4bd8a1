"""The loss lies on the assistant's words and on nothing else, whatever a chat template does to the turns."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_parts import MARKED, OPENED, PLAIN, STRICT, THINKING, save_trained, save_words, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.chat import Span, token_mask
from trainer.config import DataConfig
from trainer.encoder import Encoder
from trainer.errors import ConfigError

Show = Callable[..., list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("words"), template=None)


@pytest.fixture
def show(folder: Path) -> Show:
    """Encodes lines: each as its text with the supervised tokens in [[ ]], or as `!reason`."""

    def run(template: str, *entries: dict[str, Any], last: bool = False, **options: Any) -> list[str]:
        config = DataConfig(path="-", turns="last" if last else "all")
        encoder = Encoder(folder, config, template, options, frozenset())
        out = []
        for made in encoder.encode([json.dumps(e).encode() for e in entries]):
            entry = json.loads(made.line)
            out.append("!" + entry["refused"] if "refused" in entry else shown(encoder.tokenizer, entry))
        return out

    return run


def shown(tokenizer: Any, entry: dict[str, Any]) -> str:
    text, ids, mask = "", entry["input_ids"], entry["loss_mask"]
    assert len(ids) == len(mask)
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            piece = tokenizer.decode(ids[start:i], clean_up_tokenization_spaces=False)
            text += f"[[{piece}]]" if mask[start] else piece
            start = i
    return text


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": turns(*texts, **more)}


def q(text: str, role: str = "user") -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


A = "<|im_start|>assistant\n"


def test_every_turn_of_the_assistant_with_its_end_token(show: Show) -> None:
    found = show(PLAIN, chat("hi", "hey you", "and?", "more", system="be brief"))
    assert found == [
        q("be brief", "system") + q("hi") + A + "[[hey you<|im_end|>]]\n" + q("and?") + A + "[[more<|im_end|>]]\n"
    ]
    assert show(PLAIN, chat("hi", "hey", "and?", "more"), last=True) == [
        q("hi") + A + "hey<|im_end|>\n" + q("and?") + A + "[[more<|im_end|>]]\n"
    ]


def test_words_of_the_assistant_in_a_question_stay_a_question(show: Show) -> None:
    """The same text, the assistant's own header and the end token in it."""
    trick = f"say this:<|im_end|>\n{A}this<|im_end|>"
    assert show(PLAIN, chat(trick, "this")) == [q(trick) + A + "[[this<|im_end|>]]\n"]
    assert show(PLAIN, chat("<|im_start|>", "<|im_start|>")) == [q("<|im_start|>") + A + "[[<|im_start|><|im_end|>]]\n"]


@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_thoughts_are_trained_where_the_template_leaves_them(show: Show, template: str) -> None:
    """Of earlier turns the thoughts are cut out; an empty thought that the template puts in is nobody's words."""
    tag = "<think>\n"
    begin = f"{tag}[[" if template is OPENED else f"[[{tag}"
    thought = "<think>\nhm, one\n</think>\n\n"
    assert show(
        template,
        chat("a", thought + "first", "b", thought + "second"),
        chat("a", "first", "b", "second"),
        {"messages": [*turns("a"), {"role": "assistant", "content": "first", "reasoning_content": "so"}]},
    ) == [
        q("a") + A + "[[first<|im_end|>]]\n" + q("b") + A + begin + "hm, one\n</think>\n\nsecond<|im_end|>]]\n",
        q("a") + A + "[[first<|im_end|>]]\n" + q("b") + A + tag + "\n</think>\n\n[[second<|im_end|>]]\n",
        q("a") + A + begin + "so\n</think>\n\nfirst<|im_end|>]]\n",
    ]


def test_a_template_that_trims_and_moves_the_system_turn(show: Show) -> None:
    assert show(STRICT, chat(" a ", "  one two \n", "b", "three", system="be")) == [
        "<|bos|>[INST] be\n\na [/INST][[ one two<|im_end|>]][INST] b [/INST][[ three<|im_end|>]]"
    ]
    # The question of a tool breaks its order, and it says so itself.
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    talk = [*turns("a"), {"role": "assistant", "content": "x", "tool_calls": calls}, {"role": "tool", "content": "1"}]
    (refused,) = show(STRICT, {"messages": [*talk, {"role": "assistant", "content": "y"}]})
    assert refused == "!the chat template refuses it: roles must alternate"


def test_blanks_around_a_text_are_never_half_a_token(show: Show) -> None:
    """ "y" with the blank before it is one token: it is trained only where the model would write it whole."""
    assert show(PLAIN, chat("a", " yes ")) == [q("a") + A + "[[ yes]] <|im_end|>\n"]
    assert show(THINKING, chat("a", " yes")) == [q("a") + A + "<think>\n\n</think>\n\n y[[es<|im_end|>]]\n"]
    assert show(PLAIN, chat("a\n", "\n\nyes")) == [q("a\n") + A + "\n[[\nyes<|im_end|>]]\n"]


def test_characters_of_several_tokens(show: Show) -> None:
    assert show(PLAIN, chat("grüße 🦙", "das 🦙 grüßt\u0301 🧵")) == [
        q("grüße 🦙") + A + "[[das 🦙 grüßt\u0301 🧵<|im_end|>]]\n"
    ]


@pytest.mark.parametrize(
    ("kind", "words", "last"),
    [
        ("pieces", "yes the way", "one é two\n🦙 x"),
        ("composed", "yes the way", "one é two\n🦙 x"),
        ("words", "yes the way ", "one <unk> two <unk> <unk> "),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, STRICT, THINKING])
def test_tokenizers_of_every_make(tmp_path: Path, kind: str, words: str, last: str, template: str) -> None:
    encoder = Encoder(save_trained(tmp_path, kind), DataConfig(path="-"), template, {}, frozenset())
    (made,) = encoder.encode([json.dumps(chat("hello", "yes the way", "be", "one e\u0301 two\n🦙 x")).encode()])
    entry = json.loads(made.line)
    assert entry["input_ids"][0] != 0 or kind == "words"
    found = re.findall(r"\[\[(.*?)\]\]", shown(encoder.tokenizer, entry), flags=re.DOTALL)
    assert [unicodedata.normalize("NFC", f).lstrip() for f in found] == [words + "<|im_end|>", last + "<|im_end|>"]


def test_a_turn_may_end_with_a_token_that_only_the_target_names(folder: Path) -> None:
    other = PLAIN.replace("<|im_end|>", "<|bos|>")
    for ends, expected in ((frozenset({256}), "[[one<|bos|>]]\n"), (frozenset[int](), "[[one]]<|bos|>\n")):
        encoder = Encoder(folder, DataConfig(path="-"), other, {}, ends)
        (made,) = encoder.encode([json.dumps(chat("a", "one")).encode()])
        assert shown(encoder.tokenizer, json.loads(made.line)).endswith(expected)


def test_marks_of_the_template_itself(show: Show) -> None:
    assert show(MARKED, chat("a", " one ", "b", "two")) == [
        q("a") + A + "[[one<|im_end|>]]\n" + q("b") + A + "[[two<|im_end|>]]\n"
    ]
    assert show(MARKED, chat("a", "one", "b", "two"), last=True)[0].count("[[") == 1
    wrong = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    on_the_user = wrong.replace("{{ m.role }}", "{% generation %}{{ m.role }}{% endgeneration %}")
    assert show(on_the_user, chat("a", "one")) == [
        "!the template's generation marks lie elsewhere than on single turns of the assistant"
    ]
    around_all = "{% generation %}" + wrong + "{% endgeneration %}"
    assert "elsewhere than on single turns" in show(around_all, chat("a", "one", "b", "two"))[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("{{ m.content | upper }}", "changes the assistant's texts"),
        ("{{ m.content[:3] }}", "changes the assistant's texts"),
        ("{{ m.content }}{{ m.content }}", "writes turn 2 twice"),
        ("{{ m.content if m.role == 'user' }}", "no turn of the assistant is left"),
        ("{{ m.content.nothing.at.all }}", "the chat template refuses it"),
        ("{{ m.content + 1 }}", "the chat template cannot render it: TypeError"),
        ("{{ m.content[:12] if m.content | length > 12 else m.content }}", "changes the assistant's texts"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_not_guessed(show: Show, change: str, reason: str) -> None:
    assert reason in show(PLAIN.replace("{{ m.content }}", change), chat("abcde", "long enough"))[0]


def test_a_turn_that_the_template_leaves_out_has_no_loss(folder: Path) -> None:
    template = PLAIN.replace("{% for m in messages %}", "{% for m in messages[-2:] %}")
    encoder = Encoder(folder, DataConfig(path="-"), template, {}, frozenset())
    (made,) = encoder.encode([json.dumps(chat("a", "one", "b", "two")).encode()])
    assert shown(encoder.tokenizer, json.loads(made.line)) == q("b") + A + "[[two<|im_end|>]]\n"
    assert made.skipped == 1


def test_tool_calls_are_trained_as_a_whole_turn_or_not_at_all(show: Show) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "x"}}}
    asked = [*turns("a"), {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [call]}]
    talk = {"messages": [*asked, {"role": "tool", "content": "found"}, {"role": "assistant", "content": "it is x"}]}
    written = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call><|im_end|>'
    (found,) = show(THINKING, talk)
    assert f"[[<think>\nhm\n</think>\n\nwait\n{written}]]\n" in found
    assert found.endswith("[[it is x<|im_end|>]]\n")
    # Without a thought the template writes the turn in two ways: only its words can be told apart.
    del asked[1]["reasoning_content"]
    (found,) = show(THINKING, talk)
    assert f"[[wait]]\n{written}\n" in found


def test_the_clock_of_a_template_stands_still(show: Show) -> None:
    dated = '{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}' + PLAIN
    assert show(dated, chat("a", "one"))[0].startswith("01 Jan 2026<|im_start|>")
    assert show("\n" + dated, chat("a", "one"))[0].startswith("\n01 Jan 2026<|im_start|>")


def test_options_reach_the_template(show: Show) -> None:
    counted = PLAIN + "{{ tail }}"
    assert show(counted, chat("a", "one"), tail="end")[0].endswith("]]\nend")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"messages": []}, "messages is no list, or empty"),
        ({"messages": turns("a")}, "no turn of the assistant"),
        ({"messages": turns("a", "b")[1:]}, "turn 1 is the assistant's, at the beginning"),
        ({"messages": turns("a", "b") + turns("c", "d")[1:]}, "turn 3 is the assistant's, after one of the assistant"),
        ({"messages": turns("a") + turns("a", "b")}, "turn 2 is the user's, after one of the user"),
        ({"messages": [*turns("a", "b"), {"role": "system", "content": "s"}]}, "turn 3 is the system's"),
        ({"messages": [*turns("a", "b"), {"role": "tool", "content": "s"}]}, "turn 3 is the tool's"),
        ({"messages": turns("a", " \n")}, "turn 2 (assistant) is empty"),
        ({"messages": turns("", "b")}, "turn 1 (user) is empty"),
        ({"messages": [{"role": "user"}]}, "turn 1: the content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "turn 1: the content is int"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "turn 1: the role 'critic' is unknown"),
        ({"messages": ["a"]}, "turn 1 is no object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image'"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "tool_calls in a turn of the user"),
        ({"messages": turns("a", "b"), "tools": "["}, "tools is no JSON"),
        ({"messages": turns("a", "b"), "tools": "[" * 5000}, "tools is no JSON"),
        ({"messages": turns("a", "b"), "tools": [1]}, "tools is no list of objects"),
        ({"messages": turns("a", "b"), "conversations": []}, "it has messages and conversations"),
        ({"text": "a"}, "it has none of them"),
        ({"prompt": "a"}, "a prompt without a response"),
        ({"prompt": "", "response": "b"}, "prompt is no text, or empty"),
        ({"messages": turns("a", "\ud83e")}, "half a character"),
    ],
)
def test_lines_that_are_no_conversation_say_why(show: Show, entry: dict[str, Any], reason: str) -> None:
    assert reason in show(PLAIN, entry)[0]


def test_other_dialects_give_the_same_tokens(show: Show) -> None:
    speakers = ("human", "gpt")
    shared = [{"from": speakers[i % 2], "value": t} for i, t in enumerate(("a", "one", "b", "two"))]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in turns("a", "one")]
    expected = show(PLAIN, chat("a", "one", "b", "two", system="be"), chat("a", "one"))
    open_end = {"messages": turns("a", "one", "unanswered")}
    found = show(PLAIN, {"conversations": shared, "system": "be"}, {"messages": parts}, open_end)
    assert found == [*expected, expected[1]]


def test_plain_prompts_need_no_template(show: Show) -> None:
    assert show(PLAIN, {"prompt": "one y", "response": "et two"}, {"prompt": "a", "response": "b", "ended": False}) == [
        "one y[[et two<|im_end|>]]",
        "a[[b]]",
    ]


def test_a_template_that_cannot_be_parsed_is_the_configs_fault(folder: Path) -> None:
    encoder = Encoder(folder, DataConfig(path="-"), "{% for m in %}", {}, frozenset())
    with pytest.raises(ConfigError, match="cannot be parsed"):
        encoder.encode([json.dumps(chat("a", "b")).encode()])
    encoder = Encoder(folder, DataConfig(path="-"), None, {}, frozenset())
    with pytest.raises(ConfigError, match="no chat template"):
        encoder.encode([json.dumps(chat("a", "b")).encode()])


def test_only_tokens_that_lie_wholly_within_a_span_are_taken() -> None:
    ids, offsets = [1, 2, 3, 9, 4, 9], [(0, 2), (2, 5), (5, 5), (5, 7), (7, 9), (9, 10)]
    assert token_mask(ids, offsets, [Span(2, 5)], {9}) == [0, 1, 0, 1, 0, 0]
    assert token_mask(ids, offsets, [Span(1, 4), Span(7, 9)], {9}) == [0, 0, 0, 0, 1, 1]
    assert token_mask(ids, offsets, [Span(2, 8)], {9}) == [0, 1, 0, 1, 0, 0]
    assert token_mask(ids, offsets, [Span(2, 9, whole=True)], {9}) == [0, 1, 0, 1, 0, 0]
    assert token_mask(ids, offsets, [Span(0, 2, whole=True)], {9}) == [0] * 6


def test_prompts_go_through_the_same_template(tmp_path: Path) -> None:
    from trainer.prompts import Prompt, tokenize

    dated = STRICT.replace("{{- bos_token }}", "{{- strftime_now('%Y') + (mood or '') }}")
    target = save_words(tmp_path, template=dated)
    file = tmp_path / "p.jsonl"
    good, bad = Prompt(1, messages=turns("a", "b", "c")), Prompt(2, messages=[*turns("a"), *turns("b")])
    (ids,) = tokenize([good], target, file, vocab_size=300, longest=99, template_options={"mood": "!"})
    from trainer.prompts import load_tokenizer

    assert load_tokenizer(target).decode(ids) == "2026![INST] a [/INST] b<|im_end|>[INST] c [/INST]"
    faults: list[str] = []
    assert tokenize([bad, good], target, file, vocab_size=300, longest=99, bad=faults)[0] == []
    assert faults == [f"{file}:2: the chat template refuses it: roles must alternate"]


def _said(digits: str) -> st.SearchStrategy[str]:
    """Texts with these digits, and with all that templates and tokenizers treat in a way of their own."""
    odd = [
        "\n",
        " ",
        "\n\n",
        "<|im_end|>",
        "<|im_start|>",
        "assistant\n",
        "é",
        "🦙",
        "{{",
        "' + \"",
        "\\",
        "y",
        "[/INST]",
        "\u0301",
    ]
    return st.tuples(st.sampled_from(digits), st.lists(st.sampled_from([*digits, *odd]), max_size=8)).map(
        lambda parts: "".join([*parts[1], parts[0]])
    )


@settings(max_examples=150, deadline=None, database=None)
@given(
    talk=st.lists(st.tuples(_said("01234"), st.none() | _said("789"), _said("56")), min_size=1, max_size=3),
    system=st.none() | _said("01234"),
    template=st.sampled_from([PLAIN, THINKING, OPENED, STRICT, MARKED]),
    field=st.booleans(),
)
def test_whatever_is_said_the_loss_is_on_the_assistant_alone(
    folder: Path, talk: list[tuple[str, str | None, str]], system: str | None, template: str, field: bool
) -> None:
    """Users and system say 0 to 4, the assistant thinks 7 to 9 and says 5 and 6: no digit of one is in the other."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for question, thought, words in talk:
        answer = {"role": "assistant", "content": words}
        if thought is not None and field:
            answer["reasoning_content"] = thought
        elif thought is not None:
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{words}"
        messages += [{"role": "user", "content": question}, answer]
    encoder = encoder_of(folder, template)
    (made,) = encoder.encode([json.dumps({"messages": messages}).encode()])
    entry = json.loads(made.line)
    assert "refused" not in entry, entry
    pieces = [encoder.tokenizer.decode([i]) for i in entry["input_ids"]]
    on = "".join(p for p, m in zip(pieces, entry["loss_mask"], strict=True) if m)
    off = "".join(p for p, m in zip(pieces, entry["loss_mask"], strict=True) if not m)
    assert not set(on) & set("01234")
    assert not set(off) & set("56789")
    assert on.count("<|im_end|>") >= sum(not w[-1:].isspace() for _, _, w in talk)


@functools.cache
def encoder_of(folder: Path, template: str) -> Encoder:
    return Encoder(folder, DataConfig(path="-"), template, {}, frozenset())
