"""Builds the tokenizer of a GGUF file from its fields.

transformers can build one, but ignores the pre-tokenizer's name, respells control tokens, and reads
a single end token. llama.cpp's src/llama-vocab.cpp and its converter define the fields; where
llama.cpp differs from the original tokenizer.json, this follows the latter.
"""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.common.models.gguf.pre_tokenizers import named

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_LEVEL, SENTENCE_PIECE, GEMMA4 = "gpt2", "llama", "gemma4"
"""Supported values of `tokenizer.ggml.model`."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
SPACE = "▁"
"""Sentencepiece's spelling of a space."""
DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of special tokens in sentencepiece tokenizers whose files do not name them."""

ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001 - as DeepSeek spells it
}
"""Tokens that end an output in any model that has them."""
FILL_ENDS = (
    ("fim_pad", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep", ("<|file_sep|>",)),
)
"""Fields and names of tokens that end a file or repository, and therefore an output."""
AMBIGUOUS = {"</s>", "<EOT>", "<eos>", "[EOS]", "[EOT]", "<PAD>", "[PAD]"}
"""Names that are text unless the file marks them as control tokens: in Qwen's and Gemma's
vocabularies, `</s>` is HTML."""
KEEP_SPACES = {"<unk>", "<s>", "<|endoftext|>"}
"""Control tokens of Phi-3 that keep following spaces; its others strip them."""


@dataclass(frozen=True)
class GgufTokenizer:
    """The tokenizer of a file.

    Attributes:
        fields: Fields that begin with `tokenizer.` or `tokenizer.ggml.`, without that prefix.
        architecture: The model's architecture.
        name: The model's name.
        context: Maximum context of the model in tokens, if the file has it.
    """

    fields: dict[str, Any] = field(repr=False)
    architecture: str = ""
    name: str = ""
    context: int | None = None

    @classmethod
    def read(cls, reader: Any) -> "GgufTokenizer":  # noqa: ANN401 - gguf has no types
        """Read the tokenizer of a `gguf.GGUFReader`'s file."""

        def value(name: str) -> Any:  # noqa: ANN401
            held = reader.get_field(name)
            return None if held is None else held.contents()

        fields = {
            name.removeprefix("tokenizer.").removeprefix("ggml."): held.contents()
            for name, held in reader.fields.items()
            if name.startswith("tokenizer.")
        }
        architecture = value("general.architecture") or ""
        context = value(f"{architecture}.context_length")
        return cls(fields, architecture, value("general.name") or "", context)

    def save(self, target: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json to the directory `target`.

        Raises:
            ModelError: The fields describe no tokenizer, or an unknown one.
        """
        built = self.build()
        target.mkdir(parents=True, exist_ok=True)
        built.save(str(target / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **({} if self.context is None else {"model_max_length": self.context}),
            **self._named_tokens(),
            **self._chat_template(),
        }
        content = json.dumps(config, indent=2, ensure_ascii=False)
        (target / "tokenizer_config.json").write_text(content, encoding="utf-8")

    def build(self) -> "Tokenizer":
        """Build the tokenizer.

        Raises:
            ModelError: The fields describe no tokenizer, or an unknown one.
        """
        from tokenizers import AddedToken  # noqa: PLC0415 - only for GGUF files

        make = {
            BYTE_LEVEL: self._byte_level,
            SENTENCE_PIECE: self._sentence_piece,
            GEMMA4: self._gemma4,
        }
        if self.model not in make:
            raise UnsupportedModelError(
                f"Octavo does not support tokenizers of the kind {self.model} "
                f"(tokenizer.ggml.model); it supports {', '.join(make)}"
            )
        try:
            made = make[self.model]()
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"its tokenizer is damaged: {first_line(error)}") from error
        for added, special in ((self._plain, False), (self._control, True)):
            made.add_tokens(
                [
                    AddedToken(
                        self._spelling(token),
                        special=special,
                        normalized=False,
                        rstrip=special and self._strips(self.tokens[token]),
                    )
                    for token in sorted(added)
                ]
            )
        self._add_bos_and_eos(made)
        return made

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an output: the file's own, then those known by name."""
        ids = [self.ids.get(role) for role in ("eos", "eot", "eom")]
        ids += [self.ids.get(role, self._find(names)) for role, names in FILL_ENDS]
        ends = {token for token in ids if token is not None} | self._named_ends
        texts = {self.tokens[token] for token in ends}
        harmony = {"<|call|>", "<|return|>"} <= texts
        solar = "<|flush|>" in texts and bool({"<|call|>", "<|calls|>"} & texts)
        left_out = {
            "<|end|>": harmony or solar,  # between messages of one turn
            "</s>": "<|tool_response>" in texts,
        }
        return sorted(token for token in ends if not left_out.get(self.tokens[token]))

    @cached_property
    def model(self) -> str:
        """Kind of tokenizer."""
        return str(self.fields["model"])

    @cached_property
    def tokens(self) -> list[str]:
        """Tokens in the file's spelling, by id."""
        if not (tokens := self.fields.get("tokens")):
            raise ModelError("it has no tokens (tokenizer.ggml.tokens)")
        return list(tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Tokens that the file names, by role: `bos`, `eos`, `unknown`, `eot`..."""
        ids = dict(DEFAULT_IDS) if self.model == SENTENCE_PIECE else {}
        suffix = "_token_id"
        for name, token in self.fields.items():
            # llama.cpp also drops ids beyond the vocabulary.
            if name.endswith(suffix) and 0 <= token < len(self.tokens):
                ids[name.removesuffix(suffix)] = token
        return {role: token for role, token in ids.items() if token < len(self.tokens)}

    @cached_property
    def _types(self) -> list[int]:
        return list(self.fields.get("token_type") or [NORMAL] * len(self.tokens))

    @cached_property
    def _by_text(self) -> dict[str, int]:
        by_text = {text: token for token, text in enumerate(self.tokens)}
        if len(by_text) < len(self.tokens):
            twice = next(t for token, t in enumerate(self.tokens) if by_text[t] != token)
            raise ModelError(f"its tokenizer is damaged: it has the token {twice!r} twice")
        return by_text

    @cached_property
    def _control(self) -> set[int]:
        """Control tokens; a file without types marks only some, by id."""
        control = {token for token, kind in enumerate(self._types) if kind in (UNKNOWN, CONTROL)}
        control |= {self.ids[role] for role in ("bos", "eos", "eot", "eom") if role in self.ids}
        if "token_type" not in self.fields:
            control |= {self.ids[role] for role in ("unknown", "padding") if role in self.ids}
        return control | self._named_ends

    @cached_property
    def _plain(self) -> set[int]:
        """Tokens that are matched before all others, but are text."""
        user = {token for token, kind in enumerate(self._types) if kind == USER_DEFINED}
        return user - self._control

    @cached_property
    def _named_ends(self) -> set[int]:
        named_so = {self._by_text[text] for text in ENDS if text in self._by_text}
        return {token for token in named_so if self._is_control(token)}

    def _find(self, names: tuple[str, ...]) -> int | None:
        tokens = (self._by_text[name] for name in names if name in self._by_text)
        return next((token for token in tokens if self._is_control(token)), None)

    def _is_control(self, token: int) -> bool:
        """Return whether a token with a control token's name is one."""
        return self.tokens[token] not in AMBIGUOUS or self._types[token] == CONTROL

    def _spelling(self, token: int) -> str:
        """Return a token in the tokenizer's spelling."""
        text = self.tokens[token]
        if self.model != BYTE_LEVEL and self._types[token] == USER_DEFINED:
            # llama.cpp's converter respells them, because llama.cpp matches them in text.
            respelt = text.replace(" ", SPACE)
            return text if respelt in self._by_text else respelt
        return text

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Existing tokens; the others only pad the model's embeddings."""
        return {
            self._spelling(token): token
            for token, text in enumerate(self.tokens)
            if text and not (self._types[token] == UNUSED and re.fullmatch(r"\[PAD\d+\]", text))
        }

    def _merges(self) -> list[tuple[str, str]]:
        if (merges := self.fields.get("merges")) is None:
            raise ModelError("it has no merges (tokenizer.ggml.merges)")
        pairs = []
        for merge in merges:
            at = merge.index(" ", 1)
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens that merge into a token, highest scores first.

        Among pairs of the same token, longer left parts are first, as in tokenizer.json.
        """
        scores = self.fields.get("scores")
        if scores is None or len(scores) < len(self.tokens):
            raise ModelError("it has no scores (tokenizer.ggml.scores)")
        pieces = {
            self._spelling(token): 0.0 if kind == USER_DEFINED else scores[token]
            for token, kind in enumerate(self._types)
            if kind in (NORMAL, USER_DEFINED) and token not in self._control
        }
        normal = {scores[token] for token, kind in enumerate(self._types) if kind == NORMAL}
        if len(normal) == 1 and len(pieces) > len(scores) // 2:
            raise UnsupportedModelError(
                "all its tokens have one score, so their merge order is unknown: convert the "
                "original checkpoint, with its tokenizer.model, with a current llama.cpp"
            )
        merges = [
            (score, piece[:at], piece[at:])
            for piece, score in pieces.items()
            for at in range(1, len(piece))
            if piece[:at] in pieces and piece[at:] in pieces
        ]
        merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
        return [(left, right) for _, left, right in merges]

    def _byte_level(self) -> "Tokenizer":
        from tokenizers import Tokenizer, decoders, models  # noqa: PLC0415 - only for GGUF files

        words = named(self.fields.get("pre"))
        made = Tokenizer(
            models.BPE(
                self._vocabulary,
                self._merges(),
                ignore_merges=words.ignore_merges,
            )
        )
        if (normalizer := words.normalizer()) is not None:
            made.normalizer = normalizer
        made.pre_tokenizer = words.build()
        made.decoder = decoders.ByteLevel()
        return made

    def _sentence_piece(self) -> "Tokenizer":
        if self.fields.get("remove_extra_whitespaces"):
            raise UnsupportedModelError(
                "its tokenizer removes spaces (tokenizer.ggml.remove_extra_whitespaces), which "
                "Octavo does not support for this kind"
            )
        prefix = self.fields.get("add_space_prefix", True)
        return self._of_pieces(self._merges_by_score(), prefix=bool(prefix))

    def _gemma4(self) -> "Tokenizer":
        return self._of_pieces(self._merges(), prefix=False)

    def _of_pieces(self, merges: list[tuple[str, str]], *, prefix: bool) -> "Tokenizer":
        """Build a tokenizer of whole texts, with byte tokens for unknown characters.

        Args:
            merges: Pairs of tokens, in order of merging.
            prefix: Whether to add a space before each text and after control tokens.
        """
        from tokenizers import Tokenizer, decoders, models, normalizers  # noqa: PLC0415

        unknown = self.ids.get("unknown")
        made = Tokenizer(
            models.BPE(
                self._vocabulary,
                merges,
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
        made.normalizer = (
            normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                *([decoders.Strip(" ", 1, 0)] if prefix else []),
            ]
        )
        return made

    def _strips(self, text: str) -> bool:
        """Return whether spaces after a control token are stripped, as in Phi-3."""
        phi3 = self.architecture == "phi3" or re.search(r"phi[- ]?3", self.name.lower())
        return self.model == SENTENCE_PIECE and bool(phi3) and text not in KEEP_SPACES

    def _add_bos_and_eos(self, made: "Tokenizer") -> None:
        """Add BOS and EOS tokens to texts, by the file or else by llama.cpp's rule."""
        from tokenizers import processors  # noqa: PLC0415 - only for GGUF files

        adds_bos = self.model != BYTE_LEVEL or named(self.fields.get("pre")).adds_bos
        adds = {
            # llama.cpp ignores this field of Gemma 4's files, as some have it wrong.
            "bos": self.model == GEMMA4 or self.fields.get("add_bos_token", adds_bos),
            "eos": self.fields.get("add_eos_token", False),
        }
        for role in ("bos", "eos"):
            if adds[role] and role not in self.ids:
                raise UnsupportedModelError(
                    f"it adds a {role.upper()} token to texts, but does not define it"
                    f" (tokenizer.ggml.{role}_token_id)"
                )
        pieces = [
            f"{self.tokens[self.ids['bos']]}:0" if adds["bos"] else "",
            "$A:0",
            f"{self.tokens[self.ids['eos']]}:0" if adds["eos"] else "",
        ]
        made.post_processor = processors.TemplateProcessing(
            single=[piece for piece in pieces if piece],
            pair=[piece.replace("$A", side) for side in ("$A", "$B") for piece in pieces if piece],
            special_tokens=[
                (self.tokens[self.ids[role]], self.ids[role])
                for role in ("bos", "eos")
                if adds[role]
            ],
        )

    def _named_tokens(self) -> dict[str, str]:
        """Return the tokens that have names in transformers."""
        roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        # Naming makes a token a control token, which text tokens must not become.
        return {
            f"{name}_token": self.tokens[self.ids[role]]
            for role, name in roles.items()
            if self.ids.get(role) in self._control
        }

    def _chat_template(self) -> dict[str, Any]:
        """Return the chat template, or all of them by name."""
        names = self.fields.get("chat_templates") or []
        templates = {name: self.fields.get(f"chat_template.{name}") for name in names}
        if (template := self.fields.get("chat_template")) is None:
            return {}
        if not templates:
            return {"chat_template": template}
        templates = {"default": template} | templates
        return {
            "chat_template": [
                {"name": name, "template": held} for name, held in templates.items() if held
            ]
        }
