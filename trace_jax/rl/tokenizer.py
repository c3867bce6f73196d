"""Text to token ids and back: bytes for models trained from scratch, else the checkpoint's own.

A question is tokenised once, by `chat`, on its way into a rollout. What a model samples stays ids
from then on (Rollout.tokens_BT): text is read from it for rewards and logs only, and is never
tokenised again. One text has many tokenisations and a template drops old thinking, so other ids
would come back, and training would see a sequence that nobody sampled.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from trace_jax.models.hugging_face.tensors import read_json
from trace_jax.rl import chat
from trace_jax.rl.chat import Message


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are bytes; pad and end-of-sequence follow; the rest is never produced by `encode`.

    The vocabulary is padded to a multiple of 16, so that an embedding or head of this width can be
    cut into NVFP4 blocks.
    """

    pad_id: int = 256
    eos_id: int = 257
    vocab_size: int = 272

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a completion."""
        return (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`; what UTF-8 cannot hold (a lone surrogate) becomes '?'."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special and unused ids are dropped, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Message], **options: object) -> list[int]:
        """The last user message as it is: bytes have no turns. Raises ValueError without one."""
        del options
        asked = [message["content"] for message in messages if message.get("role") == "user"]
        if not asked:
            raise ValueError(f"no message of role 'user' in {messages!r}; a prompt ends with one")
        return self.encode(asked[-1])


@dataclasses.dataclass(frozen=True)
class CheckpointTokenizer:
    """The tokenizer of a checkpoint's directory, as its files describe it.

    Read are tokenizer.json; what ends a turn and what pads, of tokenizer_config.json,
    generation_config.json and config.json, where they exist; and the chat template. `chat_options`
    are names for the template in every chat, such as (("enable_thinking", False),).
    Source: qwen.md 3.5.

    Raises:
      FileNotFoundError: there is no tokenizer.json.
      ValueError: a file is malformed, or none names a stop id.
    """

    directory: Path
    chat_options: tuple[tuple[str, object], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "directory", Path(self.directory))
        if not self.stop_ids:
            raise ValueError(
                f"{self.directory}: no stop id; fix: name one in generation_config.json "
                "('eos_token_id'), tokenizer_config.json ('eos_token') or config.json"
            )

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a completion, the end of a turn first.

        No one file can be trusted with them: config.json of Qwen3.5 and later names the end of a
        document alone, while its turns end with another token.
        """
        named = [self._id(TURN_END)]
        for config in self._configs:
            ends = config.get("eos_token_id")
            named += ends if isinstance(ends, list) else [ends]
        named += [self._id(self._special_tokens.get("eos_token")), self._id(DOCUMENT_END)]
        return tuple(dict.fromkeys(_ids(named)))

    @property
    def eos_id(self) -> int:
        """The id that ends a turn of chat."""
        return self.stop_ids[0]

    @functools.cached_property
    def pad_id(self) -> int:
        """The id that fills up; where no file names one, the last stop id."""
        named = [self._id(self._special_tokens.get("pad_token"))]
        named += [config.get("pad_token_id") for config in self._configs]
        return [*_ids(named), self.stop_ids[-1]][0]

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest id + 1. A model may have more rows, which no text uses."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing put before or after; names of special tokens become them.

        What UTF-8 cannot hold (a lone surrogate) becomes '?'.
        """
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special and unused ids are dropped, broken UTF-8 becomes U+FFFD."""
        dropped = {*self.stop_ids, self.pad_id}
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i not in dropped]
        return self._tokenizer.decode(known, skip_special_tokens=True)

    def chat(self, messages: Sequence[Message], **options: object) -> list[int]:
        """The ids of `messages` by the checkpoint's template, up to where the answer begins.

        `options` are further names for the template. Raises ValueError where the checkpoint has no
        template, or its template refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                f"{self.directory}: no chat template; fix: add chat_template.jinja, or "
                "'chat_template' in tokenizer_config.json"
            )
        variables = {**self._special_tokens, **dict(self.chat_options), **options}
        return self.encode(chat.render(self._template, messages, **variables))

    @functools.cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; fix: copy the checkpoint's own there (vocab.json and "
                "merges.txt alone are not read)"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path}: the tokenizers package cannot read it: {error}") from error
        tokenizer.no_truncation()  # a file may carry the settings of whoever saved it
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def _tokenizer_config(self) -> dict:
        return _read_json(self.directory / "tokenizer_config.json")

    @functools.cached_property
    def _configs(self) -> tuple[dict, ...]:
        """What may name stop and pad ids, the most trusted first."""
        generation = _read_json(self.directory / "generation_config.json")
        model = _read_json(self.directory / "config.json")
        return generation, model, model.get("text_config") or {}

    @functools.cached_property
    def _special_tokens(self) -> dict[str, str]:
        """The text of special tokens, by the names that templates read."""
        fields = {name: self._tokenizer_config.get(name) for name in SPECIAL_TOKENS}
        return {
            name: token["content"] if isinstance(token, Mapping) else token
            for name, token in fields.items()
            if token is not None
        }

    @functools.cached_property
    def _template(self) -> str | None:
        """The chat template: a file of its own, else a field, which may list several by name."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            return {each["name"]: each["template"] for each in template}.get("default")
        return template

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)


Tokenizer = ByteTokenizer | CheckpointTokenizer

SPECIAL_TOKENS = (  # fields of tokenizer_config.json
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
TURN_END, DOCUMENT_END = "<|im_end|>", "<|endoftext|>"


def _read_json(path: Path) -> dict:
    """The object of a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__} where a JSON object is expected")
    return value


def _ids(values: Iterable[object]) -> list[int]:
    """Those of `values` that are ids: not None, and not the -1 that some configs hold."""
    return [value for value in values if type(value) is int and value >= 0]
