"""A model's tokenizer with the interface of transformers' tokenizers, as scripts use it beside an engine."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from jengine.api.chat import own_template, plain_json
from jengine.base.errors import InvalidArgument
from jengine.text.tokenizer import SPECIAL_TOKENS, Tokenizer

Ids = list[int]


class Encoded(UserDict[str, Any]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name != "data" and name in self.data:
            return self.data[name]
        raise AttributeError(name)


class ScriptTokenizer:
    """A model's tokenizer with the methods, defaults and results of transformers' fast tokenizers.

    For text only: pairs of texts, offsets and PyTorch tensors are rejected by name. A pad token may be set;
    it affects padding only.

    Attributes:
        tokenizer: the tokenizer that the engine uses.
        padding_side: "right" or "left"; where padding is added.
        truncation_side: "right" or "left"; where tokens are removed.
    """

    is_fast = True

    def __init__(
        self, tokenizer: Tokenizer, name_or_path: str = "", model_max_length: int | None = None
    ) -> None:
        self.tokenizer, self.name_or_path = tokenizer, name_or_path
        self.model_max_length = model_max_length
        self.padding_side = self.truncation_side = "right"
        self._special = dict(tokenizer.special_tokens)

    def __repr__(self) -> str:
        return f"ScriptTokenizer({self.name_or_path!r}, {len(self)} tokens, {self._special})"

    # --- text to tokens ------------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool = True,
        **others: Any,
    ) -> Encoded:
        """Encode a text, or several. Has `input_ids` and `attention_mask`: lists, one for each text if
        several were given.

        Args:
            padding: True or "longest": to the longest of the texts; "max_length": to max_length.
            truncation: cut texts to max_length tokens.
            return_tensors: None, or "np" for int64 arrays [texts, tokens].

        Raises:
            InvalidArgument: an argument is not supported, or texts of different lengths have no padding.
        """
        _reject(others, text_pair=None, text_target=None, is_split_into_words=False,
            return_token_type_ids=(None, False), stride=0,
                return_offsets_mapping=False, return_overflowing_tokens=False,
                return_special_tokens_mask=False, return_length=False,
                pad_to_multiple_of=None, verbose=(True, False))  # fmt: skip
        texts = [text] if isinstance(text, str) else list(text)
        ids = [self._encode(one, add_special_tokens, truncation, max_length) for one in texts]
        return self._result(
            ids, isinstance(text, str), padding, max_length, return_tensors, return_attention_mask
        )

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        truncation: bool | str = False,
        max_length: int | None = None,
        **others: Any,
    ) -> Ids:
        """The token ids of a text, with the special tokens that the tokenizer prescribes around it.

        Raises:
            InvalidArgument: not valid Unicode, or an argument that is not supported.
        """
        _reject(others, text_pair=None, padding=False, return_tensors=None, stride=0)
        return self._encode(text, add_special_tokens, truncation, max_length)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text, as they are in the vocabulary."""
        return list(self.tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).tokens)

    def pad(
        self,
        encoded: Any,
        *,
        padding: bool | str = True,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **others: Any,
    ) -> Encoded:
        """Pad what calling the tokenizer returned for several texts, or a list of such results."""
        _reject(others, pad_to_multiple_of=None, return_attention_mask=(None, True), verbose=(True, False))
        ids = (
            [one["input_ids"] for one in encoded]
            if isinstance(encoded, list | tuple)
            else encoded["input_ids"]
        )
        return self._result([[*row] for row in ids], False, padding, max_length, return_tensors, True)

    # --- tokens to text ------------------------------------------------------------------------------

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **others: Any) -> str:
        """The text of token ids: a list, an array or one id. Special tokens are included by default, as in
        transformers.
        """
        _reject(
            others, clean_up_tokenization_spaces=(None, False), spaces_between_special_tokens=(True, False)
        )
        return self.tokenizer.decode(_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Any], *, skip_special_tokens: bool = False, **others: Any
    ) -> list[str]:
        """The text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens, **others) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or of each id; None outside the vocabulary."""
        if isinstance(ids, int | np.integer):
            return self.tokenizer.backend.id_to_token(int(ids))
        hidden = self.tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        return [self.tokenizer.backend.id_to_token(one) for one in _ids(ids) if one not in hidden]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each token; the unknown token's, or None, if it is not in the
        vocabulary.
        """
        if isinstance(tokens, str):
            found = self.tokenizer.backend.token_to_id(tokens)
            return self._id("unk_token") if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        decoder = self.tokenizer.backend.decoder
        return "".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

    # --- conversations -------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation, or each of several, in the form that the model was trained on.

        Args:
            conversation: messages with "role" and "content", or a list of conversations.
            tools, documents: plain JSON, for templates that show them.
            chat_template: a Jinja template, or the name of one of the model's; by default the model's.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end inside the last message.
            tokenize: return token ids, otherwise text.
            return_dict: return the ids as calling the tokenizer does.
            variables: further variables of the template, such as enable_thinking.

        Raises:
            InvalidArgument: the template rejects the conversation, or an argument is not plain JSON.
            ModelError: the model has no chat template.
        """
        masks = {name: variables.pop(name) for name in ("return_assistant_tokens_mask",) if name in variables}
        _reject(masks, return_assistant_tokens_mask=False)
        how = variables.pop("tokenizer_kwargs", None) or {}
        if add_generation_prompt and continue_final_message:
            raise InvalidArgument("add_generation_prompt", True, "excludes continue_final_message")
        template = own_template(self.tokenizer, tools is not None, chat_template)
        single = not conversation or isinstance(conversation[0], dict)
        texts = [
            template.render(
                plain_json("messages", list(one)),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=plain_json("tools", tools),
                variables=plain_json("variables", {**variables, "documents": documents}),
                adapts=False,  # as transformers
            )
            for one in ([conversation] if single else conversation)
        ]
        if not tokenize:
            return texts[0] if single else texts
        encoded = self(
            texts[0] if single else texts,
            add_special_tokens=False,  # the template writes them
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            **how,
        )
        return encoded if return_dict else encoded["input_ids"]

    @property
    def chat_template(self) -> str | None:
        """The source of the model's template; None: it has none."""
        template = self.tokenizer.chat_templates.get("default")
        return None if template is None else template.source

    def get_chat_template(
        self, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The source of the template that `apply_chat_template` would use. Raises ModelError if there is
        none.
        """
        return own_template(self.tokenizer, tools is not None, chat_template).source

    # --- vocabulary ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.tokenizer.backend.get_vocab_size(with_added_tokens=True)

    def __contains__(self, token: str) -> bool:
        return self.tokenizer.backend.token_to_id(token) is not None

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary without added tokens; `len()` counts these too."""
        return self.tokenizer.backend.get_vocab_size(with_added_tokens=False)

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added tokens included."""
        return self.tokenizer.backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of added tokens."""
        return {
            token.content: number
            for number, token in self.tokenizer.backend.get_added_tokens_decoder().items()
        }

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by role, such as {"eos_token": "</s>"}."""
        return dict(self._special)

    @property
    def all_special_ids(self) -> Ids:
        return sorted(self.tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [str(self.tokenizer.backend.id_to_token(number)) for number in self.all_special_ids]

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token, pad_token and others, and their ids; None if the tokenizer has none."""
        if name in SPECIAL_TOKENS:
            return self._special.get(name)
        if name.removesuffix("_id") in SPECIAL_TOKENS:
            return self._id(name.removesuffix("_id"))
        raise AttributeError(
            f"ScriptTokenizer has no {name!r}; .tokenizer.backend is the tokenizers library's object"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        role = name.removesuffix("_id")
        if role not in SPECIAL_TOKENS:
            object.__setattr__(self, name, value)
            return
        token = value if role == name or value is None else self.tokenizer.backend.id_to_token(value)
        if role != "pad_token" or not (token is None or token in self):
            raise InvalidArgument(name, value, "only the pad token can be set, to a token of the vocabulary")
        self._special = {
            kind: known for kind, known in {**self._special, role: token}.items() if known is not None
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self.get_vocab())

    # --- private -------------------------------------------------------------------------------------

    def _id(self, role: str) -> int | None:
        token = self._special.get(role)
        return None if token is None else self.tokenizer.backend.token_to_id(token)

    def _encode(self, text: str, special: bool, truncation: bool | str, max_length: int | None) -> Ids:
        if not isinstance(text, str):
            raise InvalidArgument(
                "text", text, "must be text, or a list of texts; pairs and words are not supported"
            )
        if truncation not in (False, True, "longest_first", "do_not_truncate"):
            raise InvalidArgument("truncation", truncation, "must be True or False")
        most = self.model_max_length if max_length is None else max_length
        ids = self.tokenizer.encode(text, add_special_tokens=special)
        if truncation in (False, "do_not_truncate") or most is None or len(ids) <= most:
            return ids
        backend = self.tokenizer.backend
        around = backend.num_special_tokens_to_add(False) if special else 0
        encoding: tokenizers.Encoding = backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(most - around, 0), direction=self.truncation_side)
        return list(backend.post_process(encoding, None, special).ids)

    def _result(
        self,
        ids: list[Ids],
        single: bool,
        padding: bool | str,
        max_length: int | None,
        tensors: str | None,
        mask: bool,
    ) -> Encoded:
        if padding not in (False, True, "longest", "max_length", "do_not_pad"):
            raise InvalidArgument("padding", padding, "must be True, False, longest or max_length")
        if tensors not in (None, "np"):
            raise InvalidArgument("return_tensors", tensors, "must be None or np; engines take lists")
        masks = [[1] * len(row) for row in ids]
        if padding not in (False, "do_not_pad"):
            token = self._id("pad_token")
            if token is None:
                raise InvalidArgument(
                    "padding",
                    padding,
                    "the tokenizer has no pad token; set tokenizer.pad_token, for example to eos_token",
                )
            width = (
                max(map(len, ids), default=0)
                if padding != "max_length"
                else (max_length or self.model_max_length or 0)
            )
            ids, masks = (
                [self._padded(row, width, token) for row in ids],
                [self._padded(row, width, 0) for row in masks],
            )
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": masks} if mask else {"input_ids": ids}
        if tensors == "np":
            if len({*map(len, ids)}) > 1:
                raise InvalidArgument(
                    "padding", padding, "must be True for an array of texts of different lengths"
                )
            return Encoded({name: np.array(rows, np.int64) for name, rows in found.items()})
        return Encoded({name: rows[0] if single else rows for name, rows in found.items()})

    def _padded(self, row: Ids, width: int, value: int) -> Ids:
        filling = [value] * (width - len(row))
        return [*filling, *row] if self.padding_side == "left" else [*row, *filling]


def _reject(given: dict[str, Any], **defaults: Any) -> None:
    """Raises InvalidArgument for an argument that is unknown, or asks for more than its default."""
    for name, value in given.items():
        if name not in defaults:
            raise InvalidArgument(name, value, "there is no such argument")
        fits = defaults[name] if isinstance(defaults[name], tuple) else (defaults[name],)
        if value not in fits:
            raise InvalidArgument(
                name, value, f"must be {' or '.join(map(repr, fits))}: nothing else is supported"
            )


def _ids(ids: Any) -> Ids:
    if isinstance(ids, int | np.integer):
        return [int(ids)]
    return [int(one) for one in (ids.tolist() if hasattr(ids, "tolist") else ids)]
