"""Generation of text from a model: one text, or a data set of texts with what is promised of it.

Generated text has the same privacy as the model: the run's epsilon, however much text there is.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.config import EngineConfig, Sampling
from fedsim.data import ASSISTANT, CALLS, USER, ChatTokenizer, Message, Tokenizer, template_of
from fedsim.engine import create, expect_usable_jax
from fedsim.errors import BadChat, ConfigError, brief, expect
from fedsim.files import expand_home, near, write_json, write_with
from fedsim.models import (
    HUB,
    TOKENIZER,
    Decoder,
    LanguageModelTask,
    Pretrained,
    Prompt,
    key_of,
    lengths_up_to,
)
from fedsim.run import Console, directory, find_model
from fedsim.trust import claim_of_texts

ABOUT = ".about.json"
TEXTS_AT_ONCE, BLOCK = 64, 128
"""Texts that a process draws at a time, and texts that it draws before it takes others."""
PROMPTS = "not protected: nothing is promised to people whose texts became prompts"
OF_LINES = "an object with a prompt, or with messages, no tools, and the user's message at the end"

Asked = str | list[Message]
"""What a text begins with: its beginning, or the turns before the assistant's."""


def generate_text(
    source: str, prompt: str, *, max_tokens: int, how: Sampling, seed: int
) -> dict[str, Any]:
    """Continue a prompt with a run's last checkpoint or a pretrained model, or answer it.

    Args:
      source: the directory of a run or of a Hugging Face model, or hf:NAME.
      prompt: text; for a model with a chat template, what the user says.
      max_tokens: most tokens to generate.
      how: how they are drawn.
      seed: of the draws.
    Returns: the fields of --json; `is_reply` says whether the text answers the prompt instead of
      continuing it.
    Raises: ConfigError: there is no such model, it has no tokenizer, the prompt is too long, or a
      number is out of range.
    """
    model = _model(expand_home("model", source), max_tokens, seed)
    texts = Texts(model, [prompt], max_tokens, chats=bool(prompt), field="prompt")
    (tokens,) = draw(texts.prompts, model.params, *texts.settings(how, seed))
    about = {"tokens": len(tokens), "seed": seed, "is_reply": texts.is_chat}
    return {"prompt": prompt, "text": texts.text(0, tokens), **about}


def generate_texts(
    source: str,
    out: Path,
    num_texts: int,
    *,
    prompts: Path | None = None,
    max_tokens: int,
    how: Sampling,
    seed: int,
    engine: EngineConfig,
    console: Console,
) -> dict[str, Any]:
    """Sample a data set from a model, and write it with a record of what is promised of it.

    A text depends on the model, the settings, the seed and its place, and not on how many workers
    there are.

    Args:
      out: a new .parquet file. A row has a text; with prompts, a prompt and a completion, or
        messages if the model has a chat template.
      prompts: a .jsonl file of objects with a prompt or messages, which are used in turn.
      max_tokens, how, seed: of each text, as of `generate_text`.
      engine: where texts are drawn.

    Returns:
      The record.

    Raises:
      ConfigError: there is no such model, a setting does not fit it, or `out` exists.
      ReportError: the run breaks a promise.
      EngineError: workers failed.
    """
    expect("num_texts", num_texts, num_texts >= 1, ">= 1")
    expect("out", out, out.suffix == ".parquet", "a file ending in .parquet")
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in (out, out.with_name(out.name + ABOUT)):
        there = file.exists() or file.is_symlink()
        expect("out", file, not there, "a file that is not there yet")
    asked = read_prompts(prompts) if prompts else [""]
    model = _model(source := expand_home("model", source), max_tokens, seed)
    texts = Texts(model, asked, max_tokens, chats=prompts is not None, field="prompts")
    claim = claim_of_texts(source, model, console)
    given = [dataclasses.replace(texts.prompts[i % len(asked)], number=i) for i in range(num_texts)]
    blocks = [given[i : i + BLOCK] for i in range(0, num_texts, BLOCK)]
    tokens: list[list[int]] = []
    workers = create(engine, LanguageModelTask(None, model.config))
    try:
        workers.ready()
        drawn = workers.compute(draw, model.params, blocks, *texts.settings(how, seed))
        with console.phase(f"sampling {num_texts:,} texts") as progress:
            for done, block in enumerate(drawn, 1):
                tokens += block
                progress(done, len(blocks))
    finally:
        workers.close()
    told = {"max_tokens": max_tokens, **dataclasses.asdict(how), "seed": seed}
    about = {"file": out.name, **claim, "prompts": PROMPTS if prompts else "none"}
    about |= {"num_texts": num_texts, "tokens": sum(map(len, tokens)), "settings": told}
    rows = pa.Table.from_pylist([texts.row(i % len(asked), ids) for i, ids in enumerate(tokens)])
    write_json(out.with_name(out.name + ABOUT), about)  # first, so that no set is without it
    write_with(out, lambda path: pq.write_table(rows, path))
    return {**about, "file": str(out)}


def draw(
    prompts: Sequence[Prompt], params: Any, config: Any, how: Sampling, ends: Any, length: int, seed
) -> list[list[int]]:
    """Draw the tokens after each prompt. Equal arguments give equal ones on hosts of one kind."""
    decoder = Decoder(config, params, how, ends)
    slots = min(TEXTS_AT_ONCE, len(prompts))
    return decoder.texts(prompts, key_of(seed), slots=slots, length=length)


class Texts:
    """What a model reads before texts, and what they are in a data set.

    Attributes: prompts: the tokens before each; is_chat: texts are replies to messages.
    """

    def __init__(
        self, model: Pretrained, asked: Sequence[Asked], max_tokens: int, *, chats: bool, field: str
    ):
        """Tokenise prompts.

        Args:
          max_tokens: most tokens of each text.
          chats: whether prompts are messages if the model has a chat template.
          field: the setting that names prompts, for errors.
        Raises: ConfigError: a prompt is too long, or the model takes no such messages.
        """
        assert model.tokenizer is not None
        self._config, self._tokenizer = model.config, Tokenizer.load(model.tokenizer)
        template = template_of(self._tokenizer) if chats else None
        chat, longest = ChatTokenizer(self._tokenizer, template), model.config.table
        self.is_chat, self._ends = template is not None, self._tokenizer.end_ids
        self._asked: list[Asked] = []
        self.prompts: list[Prompt] = []
        for each in asked:
            if self.is_chat:
                each = [Message(USER, each)] if isinstance(each, str) else each
                try:
                    ids = chat.encode_prompt(each).tolist()
                    end = None if self.prompts else chat.end_of_turn()
                except BadChat as error:
                    wanted = f"a chat that the template takes ({error})"
                    raise ConfigError.of(field, brief(each[-1].content, 40), wanted) from None
                self._ends = self._ends | ({end} if end is not None else set())
            else:
                there = "prompts without messages, for a model without a chat template"
                expect(field, "messages", isinstance(each, str), there)
                ids = [self._tokenizer.begin_id, *self._tokenizer.encode_batch([str(each)])[0]]
            self._asked.append(each)
            expect(field, f"{len(ids)} tokens", len(ids) < longest, f"fewer than {longest} tokens")
            self.prompts.append(Prompt(ids, min(max_tokens, longest - len(ids))))

    def settings(self, how: Sampling, seed: int) -> tuple[Any, Sampling, Any, int, int]:
        """Arguments of `draw` after the prompts and the parameters."""
        most = max(len(prompt.ids) + prompt.most for prompt in self.prompts)
        length = next(n for n in lengths_up_to(self._config.table) if n >= most)
        return self._config, how, self._ends, length, seed

    def text(self, i: int, ids: Sequence[int]) -> str:
        """What the model wrote after prompt i."""
        before = [] if self.is_chat else self.prompts[i].ids
        return self._tokenizer.decode_after(before, ids[:-1] if ids[-1] in self._ends else ids)

    def row(self, i: int, ids: Sequence[int]) -> dict[str, Any]:
        """The row of a text after prompt i in a data set."""
        text, asked = self.text(i, ids), self._asked[i]
        if isinstance(asked, str):
            return {"prompt": asked, "completion": text} if asked else {"text": text}
        turns = [*asked, Message(ASSISTANT, text)]
        return {"messages": [{"role": each.role, "content": each.content} for each in turns]}


def read_prompts(file: Path) -> list[Asked]:
    """Read a file of prompts. Raises: ConfigError: it cannot be read, or a line is no prompt."""
    expect("prompts", file, file.suffix == ".jsonl", "a .jsonl file of objects")
    found: list[Asked] = []
    try:
        for line in file.read_text(encoding="utf-8").split("\n"):
            found += [_asked(line)] if line.strip() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("prompts", file, f"a readable file in UTF-8 ({error})") from None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        wanted = f"{OF_LINES}, as its prompt {len(found) + 1}"
        raise ConfigError.of("prompts", file, wanted) from None
    expect("prompts", file, bool(found), "a file with a prompt at least")
    return found


def _asked(line: str) -> Asked:
    """The prompt in a line of JSON. Raises one of several errors if there is none."""
    record = json.loads(line)
    json.dumps(record, ensure_ascii=False).encode()  # refuses halves of characters
    if isinstance(record.get("prompt"), str) and record["prompt"]:
        return record["prompt"]
    messages = [Message(each["role"], each["content"]) for each in record["messages"]]
    texts = all(isinstance(part, str) for each in messages for part in each[:2])
    has_tools = record.get("tools") or any(each.get(CALLS) for each in record["messages"])
    if has_tools or not texts or not messages or messages[-1].role != USER:
        raise ValueError
    return messages


def _model(source: str, max_tokens: int, seed: int) -> Pretrained:
    """The model that `source` names. Raises: ConfigError: there is none, it has no tokenizer, or
    no text can be drawn with these settings."""
    expect_usable_jax()
    expect("max_tokens", max_tokens, max_tokens >= 1, ">= 1")
    key_of(seed)
    there = "/" in source or Path(source).exists() or source.startswith(HUB)
    beside = "" if there else near(Path(source), f"*/{directory.CONFIG}")
    kinds = f"the directory of a run or of a Hugging Face model{beside}, or hf:NAME"
    model = find_model(source) if there else None
    expect("model", source, model is not None, kinds)
    assert model is not None
    expect("model", source, model.tokenizer is not None, f"a model with a {TOKENIZER}")
    return model
