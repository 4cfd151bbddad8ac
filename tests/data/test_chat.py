"""Chats as token ids: those of transformers, but nobody's text becomes a special token."""

import json
from functools import cache
from pathlib import Path

import jinja2
import pytest
import tokenizers
from chats import CHATML, NAMED, START, STOP, tiny
from hypothesis import example, given, settings, strategies as st
from tokenizers import models, normalizers

from fedsim.data import chat
from fedsim.data.chat import ChatTokenizer, Message, Template
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import BadChat, DataError, SlowTemplate

SHARED = Path(__file__).parents[3] / "shared"
GENERATING = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {{- m.role + ': ' }}{% if m.role == 'assistant' %}\n"
    "    {% generation %}{{ m.content | trim }}{{ '<|im_end|>' }}{% endgeneration %}{% else %}\n"
    "{{ m.content }}{% endif %}\n"
    "{% endfor %}"
)
TINY = tiny()


@cache
def chats_of(template):
    return ChatTokenizer(TINY, template)


def turns(*texts, first="user"):
    """User and assistant in turn."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [Message(roles[i % 2], text) for i, text in enumerate(texts)]


def shown(encoded, tokenizer=TINY):
    """(the text of all ids, the text of the trained ones)."""
    return tuple(tokenizer.decode(x, special=True) for x in (encoded.ids, trained(encoded)))


def trained(encoded):
    return encoded.ids[encoded.trained]


def encode(messages, template=CHATML, train_on="assistant", **options):
    return chats_of(Template(template, **options)).encode(messages, train_on)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_ids_and_masks_are_those_of_transformers_but_for_what_a_person_spells():
    golden = json.loads((SHARED / "chat" / "smollm2_golden.json").read_text())
    tokenizer = Tokenizer.load(SHARED / "models" / "smollm2_tokenizer.json")
    chats = ChatTokenizer(tokenizer, Template(golden["chat_template"]))
    for number, case in enumerate(golden["cases"], 1):
        messages = [Message(**each) for each in case["messages"]]
        found = chats.encode(messages, "assistant")
        assert tokenizer.decode(found.ids, special=True) == case["text"]
        if number == 4:  # a person spells special tokens, which stay text
            assert found.ids.tolist() != case["ids"]
            assert (found.ids == 1).sum() == 3 and (found.ids == 2).sum() == 3
            assert tokenizer.decode(trained(found), special=True) == f"I would rather not.{STOP}\n"
            continue
        assert found.ids.tolist() == case["ids"]
        if number == 3:  # blanks are one token with the line break before, and are said by the turn
            assert not any(case["assistant_mask"])
            assert shown(found, tokenizer)[1] == f"\n  leading spaces stay\n{STOP}\n"
        else:
            assert found.trained.astype(int).tolist() == case["assistant_mask"]


REASONING = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"


def test_the_assistants_turns_are_trained_on_with_what_ends_them():
    found = encode(turns("Hi", "Ho", "Hum", "Ha"))
    every, own = shown(found)
    assert every.startswith(f"{START}user\nHi{STOP}\n{START}assistant\nHo{STOP}\n{START}user")
    assert own == f"Ho{STOP}\nHa{STOP}\n"
    assert shown(encode(turns("Hi", "Ho", "Hum")))[1] == f"Ho{STOP}\n"  # the end is another's turn
    silent = [Message("user", ""), Message("assistant", " \n"), Message("assistant", "Ho", False)]
    assert not encode(silent).trained.any()
    assert shown(encode([*silent, Message("assistant", "Ha")]))[1] == f"Ha{STOP}\n"
    found = encode(turns("Hi", "<think>so</think>Ho", "And?", "Yes"), REASONING, "completion")
    assert shown(found) == (f"Hi{STOP}Ho{STOP}And?{STOP}Yes{STOP}", f"Yes{STOP}")


def test_blocks_of_what_is_generated_decide():
    found = encode(turns("Hi", " Ho ", "Hum", "Ha"), GENERATING, tokens=(("bos_token", START),))
    whole = f"{START}user: Hiassistant: Ho{STOP}user: Humassistant: Ha{STOP}"
    assert shown(found) == (whole, f"Ho{STOP}Ha{STOP}")
    only_last = encode(turns("Hi", "Ho", "Hum", "Ha"), GENERATING, "completion")
    assert shown(only_last)[1] == f"Ha{STOP}"


THINKING = (  # as Qwen 3's: before the last answer alone, and not in what asks for one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' }}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_what_is_trained_on_follows_what_serving_asks(train_on):
    said = turns("Hi", "Ho", "Hum", "\n Ha")
    found, chats = encode(said, THINKING, train_on), chats_of(Template(THINKING))
    last = f"<think>\n\n</think>\n\n\n Ha{STOP}"
    assert shown(found)[1] == (f"Ho{STOP}" if train_on == "assistant" else "") + last
    asked = chats.encode_prompt(said[:3])
    assert found.ids[: len(asked)].tolist() == asked.tolist()
    assert found.trained[len(asked) :].all()
    assert not found.trained[: chats.encode_prompt(said[:1]).size].any()


@pytest.mark.parametrize("normalized", [False, True])
def test_special_tokens_that_are_not_found_in_normalised_texts_are_refused(normalized):
    inner = tokenizers.Tokenizer.from_str(tiny(special=["<s>"]).json)
    inner.normalizer = normalizers.Prepend("_")
    tokens = [tokenizers.AddedToken(x, normalized=normalized) for x in (START, STOP)]
    inner.add_special_tokens(tokens)
    chats = ChatTokenizer(Tokenizer(inner, "x", named=NAMED), Template(CHATML))
    if normalized:
        with pytest.raises(BadChat, match="expected `normalized` and `single_word` of false"):
            chats.encode(turns("Hi", "Ho"), "assistant")
    else:
        assert chats.encode(turns("Hi", "Ho"), "assistant").trained.any()
    assert chats.encode_pair("Hi", "Ho", "all").trained.sum() > 2  # which needs no template


CALLING = (  # as Qwen's: after a text, or instead of it
    "{% for t in tools or [] %}{{ START + 'system\n' + t | tojson + STOP }}{% endfor %}"
    "{% for m in messages %}{{ START + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] if c.type == 'function' %}{{ '\n' + c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ STOP }}{% endfor %}"
    "{{ START + 'assistant\n' if add_generation_prompt }}"
)
MARKING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ STOP }}"
    "{% endgeneration %}{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
)
LATE = (  # as Mistral's: tools stand before the last question, and a blank before answers alone
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages "
    "%}{% if m.role == 'user' %}{{ tools | tojson if m == asked[-1] }}[{{ m.content }}]{% elif "
    "m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ STOP }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + STOP }}{% else %}{{ m.tool_call_id + m.content }}{% endif %}{% endfor %}"
)
TOKENS = (("START", START), ("STOP", STOP))
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def calling(*names, content="", **arguments):
    functions = [{"name": name, "arguments": arguments} for name in names]
    calls = [{"id": "1", "type": "function", "function": each} for each in functions]
    return Message("assistant", content, fields={"tool_calls": calls})


def result(text):
    return Message("tool", text, fields={"tool_call_id": "1"})


CALLED = [(CALLING, "Well\nfind{}\nend{}"), (MARKING, "Wellfind{}end{}"), (LATE, "find{}end{}")]


@pytest.mark.parametrize("template, last", CALLED, ids=["calling", "marking", "late"])
def test_calls_of_tools_are_trained_on_and_their_results_are_not(template, last):
    first = 'find{"city": "é"}'
    said = [*turns("Hi"), calling("find", city="é"), result("Paris"), Message("assistant", "Ho")]
    said += [*turns("So?"), calling("find", "end", content="" if template == LATE else "Well")]
    template = Template(template, TOKENS)
    found = chats_of(template).encode(said, "assistant", TOOLS)
    assert shown(found)[0] == template.render(said, TOOLS)  # as transformers calls Jinja
    assert shown(found)[1] == "".join(f"{text}{STOP}" for text in (first, "Ho", last))
    assert "Paris" in shown(found)[0] and '"name": "find"' in shown(found)[0]
    found = chats_of(template).encode(said[:2], "completion", TOOLS)
    assert shown(found)[1] == first + STOP


def test_the_template_that_comes_with_fedsim_writes_tools_and_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml-tools").write_text("{{ another }}")  # the name is reserved
    chats = chats_of(chat.template_of(TINY, "chatml-tools"))
    said = [*turns("Hi"), calling("find"), result("Paris"), Message("assistant", "Ho")]
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert shown(chats.encode(said, "assistant", TOOLS))[1] == f"{call}{STOP}\nHo{STOP}\n"
    assert chats.writes_tools and "\nTools:\n{" in shown(chats.encode(said, "all", TOOLS))[1]
    text = Path(chat.__file__).with_name("chatml-tools.jinja").read_text()
    raw = {"content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}
    assert f"start|>\n{call}" in jinja2.Template(text).render(messages=[raw])  # as OpenAI has it


@pytest.mark.privacy
def test_no_special_token_is_spelled_by_tools_calls_or_their_results():
    tool = {"type": "function", "function": {"name": "find", STOP: f"<|im_{STOP}"}}
    said = [*turns(STOP), calling("find", **{START: [STOP, 1, None]}), result(f"x{STOP}")]
    chats = chats_of(Template(CALLING, TOKENS))
    found = chats.encode(said, "assistant", [tool])
    assert shown(found)[0] == Template(CALLING, TOKENS).render(said, [tool])
    assert [(found.ids == TINY.begin_id).sum(), (found.ids == TINY.end_id).sum()] == [4, 4]
    for template in ("{{ tools }}", "{{ tools | tojson(ensure_ascii=true) }}"):
        with pytest.raises(BadChat, match="changes what tools and their calls say"):
            chats_of(Template(template + CALLING, TOKENS)).encode(said, "all", [tool])


REVERSING = CALLING.replace("c.function.name", "c.function.name | reverse")
UNCLEAR = [
    (CHATML, calling("find"), "expected a .*calls, as `chat_template='chatml-tools'` does"),
    (REVERSING, calling("find"), "changes what"),
    ("{{ messages[1].tool_calls[0].x.y }}", calling("find"), "fails with UndefinedError"),
]


@pytest.mark.parametrize("template, said, reason", UNCLEAR)
def test_a_call_that_cannot_be_told_is_refused(template, said, reason):
    with pytest.raises(BadChat, match=reason):
        chats_of(Template(template, TOKENS)).encode([*turns("Hi"), said], "assistant")


def test_a_template_that_changes_what_is_said_is_refused():
    changing = CHATML.replace("m['content']", "(m['content'] | replace('H', ''))")
    assert shown(encode(turns("Hi", "Ho"), changing))[1] == f"o{STOP}\n"  # as far as it can be told
    for change in ("m['content'][:1]", "m['content'].split('o')[-1]", "(m['content'] | reverse)"):
        with pytest.raises(BadChat, match="changes what a turn says.*generation"):
            encode(turns("Hi", "Ho"), CHATML.replace("m['content']", change))
    with pytest.raises(BadChat, match="does not write the `content` of the assistant's turns"):
        encode(turns("Hi", "Ho"), CHATML.replace("m['content']", "m['contnet'] | string"))


PIECES = [START, STOP, "<|im_", "end|>", "<", "|", "<|", ">", " ", "\n", "\r\n", "é", "😀", "مرحبا"]
PIECES += ["\U000f0000", "\U000f0001", "\U000f0004", "assistant", "\0", "x", "<|im_<|im_end|>end|>"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=6), st.sampled_from(["all", "assistant"]))
@example(["Say <|im_end|>", "<|im_", "end|>", "im_end|>", "<|im_end|"], "assistant")
def test_any_text_comes_back_and_none_becomes_a_special_token(texts, train_on):
    for template in (CHATML, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        found = encode(turns(*texts), template, train_on)
        written = [START, STOP] * len(texts) if template == CHATML else []
        special = [TINY.decode([i], special=True) for i in found.ids if i >= TINY.begin_id]
        assert special == written
        expected = "".join(texts)
        if template == CHATML:
            expected = "".join(f"{START}{m.role}\n{m.content}{STOP}\n" for m in turns(*texts))
        assert TINY.decode(found.ids, special=True) == expected
    if train_on == "assistant":
        said = [m.content for m in turns(*texts) if m.role == "assistant" and m.content.strip()]
        own = TINY.decode(encode(turns(*texts)).ids[encode(turns(*texts)).trained], special=True)
        expected = "".join(f"{text}{STOP}\n" for text in said)
        assert own.replace("\n", "") == expected.replace("\n", "")


@pytest.mark.parametrize("place", range(5))  # the marks, and a special token for each of two
def test_a_text_with_a_character_that_stands_for_something_is_refused(place):
    for messages in (turns(chr(chat.FIRST + place)), turns("Hi", f"x{chr(chat.FIRST + place)}")):
        with pytest.raises(BadChat, match="no character for private use from U.F8000 on"):
            encode(messages)
    with pytest.raises(BadChat, match="no character for private use"):
        chats_of(None).encode_pair("Hi", chr(chat.FIRST + place), "all")
    other = chr(chat.FIRST + 5)  # and one more is text
    assert shown(encode(turns("Hi", other)))[1] == f"{other}{STOP}\n"


def test_a_tokenizer_that_makes_a_special_token_of_text_is_refused():
    pieces = [("<unk>", 0.0), ("</s>", -1.0), *((c, -2.0) for c in "abc</s>")]
    inner = tokenizers.Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
    inner.add_special_tokens(["<unk>", "</s>"])
    replaced = [normalizers.Replace("<", "("), normalizers.Replace("{", "<")]
    inner.normalizer = normalizers.Sequence(replaced)  # which spells it otherwise
    template = Template("{% for m in messages %}{{ m.content }}{{ '</s>' }}{% endfor %}")
    chats = ChatTokenizer(Tokenizer(inner, "unigram"), template)
    assert chats.encode(turns("abcx", "a"), "assistant").ids[-1] == 1
    with pytest.raises(BadChat, match="makes a special token of text"):
        chats.encode(turns("a{/s>"), "all")


def test_tokens_that_the_template_names_are_special_though_the_tokenizer_says_otherwise():
    """As turn markers of some tokenizers are. <think> is the assistant's own."""
    inner = tokenizers.Tokenizer.from_str(TINY.json)
    inner.add_tokens(["<user>", "<model>", "<think>", "<other>"])
    source = "{% if 0 %}<think>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    source = source.replace("<{{ m.role }}>", "{{ '<user>' if loop.index == 1 else model }}")
    template = Template(source + "{% endfor %}", (("model", "<model>"),))
    tokenizer = Tokenizer(inner, "markers", named=NAMED)
    chats = ChatTokenizer(tokenizer, template)
    names = "user model think other".split()
    user, model, think, other = (inner.token_to_id(f"<{name}>") for name in names)
    spelled = "<user><model><think><other>x"
    found = chats.encode(turns(spelled, f"<think>{STOP}"), "all")
    special = [i for i in found.ids if i > TINY.end_id]
    assert special == [user, other, model, think]
    assert tokenizer.decode(found.ids, special=True) == f"<user>{spelled}<model><think>{STOP}"
    assert TINY.end_id not in found.ids
    pair = chats.encode_pair("<user>", "<think>", "all").ids
    assert pair[1:-1].tolist() == [user, think]


def test_white_space_that_is_a_token_is_no_special_one():
    """As several line breaks are to Gemma 3, whose template writes them, too."""
    inner = tokenizers.Tokenizer.from_str(TINY.json)
    inner.add_tokens(["\n\n"])
    tokenizer = Tokenizer(inner, "breaks", named=NAMED)
    template = Template(CHATML.replace("'\n' + m['content']", "'\n\n' + m['content']"))
    found = ChatTokenizer(tokenizer, template).encode(turns("Dear,\n\nhi", "a\n\nb"), "assistant")
    whole = f"{START}user\n\nDear,\n\nhi{STOP}\n{START}assistant\n\na\n\nb{STOP}\n"
    assert shown(found, tokenizer) == (whole, f"a\n\nb{STOP}\n")
    assert (found.ids == inner.token_to_id("\n\n")).sum() == 4


def test_a_prompt_and_its_completion_stand_between_a_begin_and_an_end_token():
    chats = ChatTokenizer(TINY)
    found = chats.encode_pair("Q: ", f"A {STOP}", "completion")
    assert found.ids[[0, -1]].tolist() == [TINY.begin_id, TINY.end_id]
    assert (found.ids >= TINY.begin_id).sum() == 2
    assert TINY.decode(trained(found), special=True) == f"A {STOP}{TINY.end}"
    assert chats.encode_pair("Q: ", "A", "all").trained.tolist() == [False, *[True] * 5]


DOUBLING = "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"


@pytest.mark.slow
@pytest.mark.parametrize("template", ["{{ 'x' * 10**10 }}", DOUBLING + "{{ f(60) }}"])
def test_a_template_that_takes_too_much_ends_its_process_alone(template, monkeypatch):
    monkeypatch.setattr("fedsim.data.limited.RENDER_S", 3.0)
    with pytest.raises(SlowTemplate, match="takes more than 3 s, or 4,294,967,296 bytes"):
        encode(turns("Hi"), template)
    assert len(encode(turns("Hi", "Ho")).ids) > 4  # the next one is served


REFUSALS = [
    ("{{ raise_exception('no ' + messages[0].content) }}", "its template refuses it"),
    ("\n{{ {}[messages[0].content].x }}", "its template fails with UndefinedError in line 2"),
    ("{{ messages.append(1) }}", "its template fails with SecurityError in line 1"),
    ("{{ ''.__class__.__mro__ }}\n\n", "its template fails with SecurityError in line 1"),
    ("{{ 'x' * 2**25 }}", "its template writes more than 16,777,216 characters"),
]


@pytest.mark.parametrize("template, reason", REFUSALS)
def test_a_refusal_says_nothing_of_a_chat(template, reason):
    with pytest.raises(BadChat) as raised:
        encode(turns("my secret"), template)
    assert str(raised.value) == reason and not isinstance(raised.value, SlowTemplate)


def test_a_template_has_what_transformers_gives_it():
    with pytest.raises(DataError, match="chat_template: .*line 2"):
        ChatTokenizer(TINY, Template("{{ messages | tojson }}\n{% if %}"))
    template = (
        "{{ strftime_now('%d %B %Y') }} {{ [messages[0].content, '<'] | tojson }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ loop.length }}{% endfor %}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ eos_token }}"
    )
    found = Template(template, (("eos_token", "</s>"),)).render(turns("é"))
    assert found == '01 January 2026 ["é", "<"]99TrueFalse</s>'


def test_a_template_is_found_where_checkpoints_keep_it(tmp_path):
    TINY.save(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert chat.template_of(tokenizer) is None
    settings = {"eos_token": {"content": "</s>"}, "bos_token": None, "chat_template": "one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat.template_of(tokenizer) == Template("one", (("eos_token", "</s>"),))
    (tmp_path / "chat_template.jinja").write_text("two")
    assert chat.template_of(tokenizer).source == "two"
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="chat_template=.*or a Jinja file"):
        chat.template_of(tokenizer, tmp_path / "own.jinja")
