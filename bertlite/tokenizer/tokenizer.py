"""BERT's tokenizer on the `tokenizers` library, with the names and the results of transformers' BertTokenizer.

A text is cleaned, lower-cased or not, split at spaces, punctuation and Chinese characters, and each word is cut into
the longest pieces that the vocabulary has; pieces inside a word begin with ##.  The Rust tokenizer holds no padding
and no truncation between calls, so that what a tokenizer.json says of them, made for another purpose, does not leak.

Letters:  B sequences · S positions, padding included
"""

import inspect
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from bertlite.checkpoint.folders import replacing

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

Text = str | Sequence[str]  # a sequence is one text split into words

NO_LIMIT = 10**30  # how transformers writes that a model_max_length is not known
ROLES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SIDES = ("right", "left")
PADDING = {
    False: None,
    None: None,
    "do_not_pad": None,
    True: "longest",
    "longest": "longest",
    "max_length": "max_length",
}
TRUNCATION = {
    False: None,
    None: None,
    "do_not_truncate": None,
    True: "longest_first",
    "longest_first": "longest_first",
    "only_first": "only_first",
    "only_second": "only_second",
}
CLASSES = (  # tokenizer_class of what tokenizes as BERT does, or is what its tokenizer.json says
    "BertTokenizer",
    "BertTokenizerFast",
    "DistilBertTokenizer",
    "DistilBertTokenizerFast",
    "ElectraTokenizer",
    "ElectraTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
SETTINGS = (  # of tokenizer_config.json, that the constructor takes as they are
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
)
NORMALIZER = {  # what tokenizer.json calls what the constructor takes
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
    "clean_text": "clean_text",
}
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of an added token
SUPERSEDED = re.compile(r"vocab\.txt|special_tokens_map\.json|added_tokens\.json")  # by a save
CONTRACTIONS = (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're")


class BatchEncoding(dict[str, Any]):
    """What a tokenizer returns: a dict, to be passed to a model as **batch, whose items are attributes too.

    `encodings` has one `tokenizers.Encoding` per sequence, which knows words and characters.
    """

    encodings: Sequence["Encoding"]

    def __init__(self, items: Mapping[str, Any] | None = None, encodings: Sequence["Encoding"] = ()) -> None:
        super().__init__(items or {})
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this encoding has no {name}; it has {', '.join(self) or 'nothing'}") from None

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Its tensors, moved to a device; this encoding itself."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device, non_blocking=non_blocking)
        return self

    def tokens(self, sequence: int = 0) -> list[str]:
        return self.encodings[sequence].tokens

    def word_ids(self, sequence: int = 0) -> list[int | None]:
        """Which word of its text each token is of; None for special tokens."""
        return self.encodings[sequence].word_ids

    def sequence_ids(self, sequence: int = 0) -> list[int | None]:
        """Whether each token is of the text (0) or of its pair (1); None for special tokens."""
        return self.encodings[sequence].sequence_ids


class BertTokenizer:
    """Texts to token ids and back, as transformers' BertTokenizer.

    A tokenizer is a value: its vocabulary and settings are chosen when it is made.  It can be pickled and shared by
    threads.

    Args:
        vocab: {token: id}, the tokens in the order of their ids, or a vocab.txt.
        do_lower_case: whether case is dropped.
        strip_accents: whether accents are; None is as `do_lower_case`.
        tokenize_chinese_chars: whether each Chinese character is a word.
        clean_text: whether control characters are dropped.
        unk_token, sep_token, pad_token, cls_token, mask_token: the special tokens; each has an id.
        added_tokens: {id: {"content": "<e>", "special": true, …}}, whole words that are never cut, as
            `added_tokens_decoder` in tokenizer_config.json.
        model_max_length: in tokens, what `truncation=True` truncates to.
        padding_side, truncation_side: "right" or "left".
        clean_up_tokenization_spaces: whether `decode` joins "do n't" and " ." too.
        max_input_chars_per_word: a longer word is unknown.

    Raises:
        ValueError: a special token is not in the vocabulary, or a setting is not one of those above.
    """

    model_input_names: ClassVar[list[str]] = ["input_ids", "token_type_ids", "attention_mask"]
    is_fast = True
    pad_token_type_id = 0
    bos_token = eos_token = bos_token_id = eos_token_id = None  # BERT has neither

    def __init__(
        self,
        vocab: Mapping[str, int] | Sequence[str] | PathLike[str],
        *,
        do_lower_case: bool = True,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        clean_text: bool = True,
        unk_token: str = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str = "[MASK]",
        added_tokens: Mapping[int, Mapping[str, Any]] | None = None,
        model_max_length: int = NO_LIMIT,
        padding_side: str = "right",
        truncation_side: str = "right",
        clean_up_tokenization_spaces: bool = False,
        max_input_chars_per_word: int = 100,
    ) -> None:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

        words = vocab if isinstance(vocab, Mapping) else numbered(vocab)
        self.unk_token, self.sep_token, self.pad_token = unk_token, sep_token, pad_token
        self.cls_token, self.mask_token = cls_token, mask_token
        self.do_lower_case, self.strip_accents = do_lower_case, strip_accents
        self.tokenize_chinese_chars, self.model_max_length = tokenize_chinese_chars, model_max_length
        self.padding_side = side("padding_side", padding_side)
        self.truncation_side = side("truncation_side", truncation_side)
        self.clean_up_tokenization_spaces = clean_up_tokenization_spaces

        if unk_token not in words:
            raise ValueError(
                f"the vocabulary of {len(words)} tokens has no {unk_token!r}: pass unk_token=, or mend it"
            )
        model = models.WordPiece(dict(words), unk_token=unk_token, max_input_chars_per_word=max_input_chars_per_word)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=clean_text,
            handle_chinese_chars=tokenize_chinese_chars,
            strip_accents=strip_accents,
            lowercase=do_lower_case,
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = decoders.WordPiece(prefix="##")
        self._add(added_tokens or {})
        for role in ROLES:
            token = getattr(self, role)
            number = self._tokenizer.token_to_id(token)
            if number is None:
                raise ValueError(f"the vocabulary of {len(words)} tokens has no {token!r}: pass {role}=, or mend it")
            setattr(self, f"{role}_id", number)
            if token not in self.get_added_vocab():
                self._add({number: {"content": token, "special": True}})
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls_token}:0 $A:0 {sep_token}:0",
            pair=f"{cls_token}:0 $A:0 {sep_token}:0 $B:1 {sep_token}:1",
            special_tokens=[(cls_token, self.cls_token_id), (sep_token, self.sep_token_id)],
        )
        self._ids = range(max(self.get_vocab().values()) + 1)
        self._lock = threading.Lock()

    unk_token_id: int
    sep_token_id: int
    pad_token_id: int
    cls_token_id: int
    mask_token_id: int

    def _add(self, tokens: Mapping[int, Mapping[str, Any]]) -> None:
        from tokenizers import AddedToken

        for number, stated in sorted(tokens.items()):
            token, special = stated["content"], bool(stated.get("special", False))
            flags = {"normalized": not special, **{flag: stated[flag] for flag in FLAGS if flag in stated}}
            holder = self._tokenizer.id_to_token(number)
            self._tokenizer.add_tokens([AddedToken(token, **flags)])
            if holder not in (None, token) or self._tokenizer.token_to_id(token) != number:
                got = self._tokenizer.token_to_id(token)
                raise ValueError(
                    f"added token {token!r} cannot have the id {number}: it would be {got}, and {number} is"
                    f" {holder!r}; added ids follow the vocabulary's"
                )

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **settings: Any,
    ) -> Self:
        """The tokenizer of a checkpoint.

        What tokenizer_config.json states goes before what tokenizer.json does, as in transformers; where both are
        silent, case is dropped.

        Args:
            source: a hub id, a folder, or a vocab.txt or tokenizer.json, whose settings are read beside it.
            revision, subfolder, cache_dir, token, local_files_only: as for `huggingface_hub`.
            settings: arguments of the constructor that replace the files'.

        Raises:
            FileNotFoundError: there is no such checkpoint, or it has neither tokenizer.json nor vocab.txt.
            ValueError: a damaged file, or the tokenizer of another kind of model.
            TypeError: a setting that the constructor does not take.
        """
        from bertlite.checkpoint.files import Source, locate

        place = locate(Source(source, revision, subfolder, None, cache_dir, token, local_files_only))
        path = Path(source).expanduser()
        names = [path.name] if path.is_file() else ["tokenizer.json", "vocab.txt"]
        found = next((file for name in names if (file := place.get(name)) is not None), None)
        if found is None:
            raise place.not_found(" or ".join(names))
        inspect.signature(cls).bind_partial(**settings)  # an unknown one is a TypeError; the others are the files'
        try:
            stated = read_config(place, found)
            read = read_tokenizer(found) if found.suffix == ".json" else read_vocabulary(found, place)
            added = {**read.pop("added_tokens"), **stated.pop("added_tokens")}
            chosen = {**read, **stated, "added_tokens": added, **settings}
            return cls(chosen.pop("vocab"), **chosen)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            if isinstance(error, ValueError):
                fact = str(error)
                raise ValueError(fact if str(found.parent) in fact else f"{found}: {fact}") from None
            kind = type(error).__name__
            raise ValueError(f"{found}, or a file beside it, is damaged ({kind}: {error}): fetch it again") from None

    # What it knows ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many tokens it has, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"BertTokenizer({len(self)} tokens, do_lower_case={self.do_lower_case})"

    @property
    def vocab_size(self) -> int:
        """How many tokens the vocabulary has, without those added."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        """{token: id}, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """{token: id} of the tokens that are never cut: special ones, and those added."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_decoder(self) -> dict[int, "AddedToken"]:
        return dict(sorted(self._tokenizer.get_added_tokens_decoder().items()))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {role: getattr(self, role) for role in ROLES}

    @property
    def all_special_tokens(self) -> list[str]:
        named = list(self.special_tokens_map.values())
        added = [token.content for token in self.added_tokens_decoder.values() if token.special]
        return list(dict.fromkeys([*named, *added]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.get_added_vocab()[token] for token in self.all_special_tokens]

    @property
    def backend_tokenizer(self) -> "Tokenizer":
        """The Rust tokenizer that does the work."""
        return self._tokenizer

    # Texts to ids ----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        text: Text | Sequence[Text] | Sequence[tuple[Text, Text]],
        text_pair: Text | Sequence[Text] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str | None = False,
        truncation: bool | str | None = False,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool = True,
        return_attention_mask: bool = True,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
    ) -> BatchEncoding:
        """Encode one text, a list of them, or pairs.

        Args:
            text: a string, or a list of strings or of pairs; if `is_split_into_words`, one list of words, or several.
            text_pair: what follows the first [SEP]; as many as there are texts.
            padding: True or "longest", to the longest of these; "max_length"; or False.
            truncation: True or "longest_first", which shortens the longer one of a pair; "only_first"; "only_second";
                or False.
            max_length: in tokens, special ones included; by default `model_max_length`.
            stride: how many tokens each overflowing piece repeats of the one before.
            return_tensors: "pt", "np" or None, for lists.
            return_overflowing_tokens: give what truncation cuts off as further sequences; `overflow_to_sample_mapping`
                says whose they are.
            return_offsets_mapping: also where in its text each token begins and ends, in characters.
            return_special_tokens_mask: also a 1 for every special token and padding.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` and what was asked for: (B, S) as tensors, else lists; of
            one text without `return_tensors` or overflow, flat lists.

        Raises:
            ValueError: a text that is no string or holds a lone surrogate; a strategy that is not one of those above;
                a max_length that is missing, too short or without effect; tensors asked of unequal lengths.
        """
        texts, batched = as_batch(text, text_pair, is_split_into_words)
        strategy = chosen("truncation", truncation, TRUNCATION)
        filling = chosen("padding", padding, PADDING)
        limit = self._limit(strategy, filling, max_length, stride, len(texts) > 0 and isinstance(texts[0], tuple))
        if strategy and filling and limit % (pad_to_multiple_of or 1):
            raise ValueError(f"max_length={limit} is no multiple of pad_to_multiple_of={pad_to_multiple_of}")
        with self._lock:  # the Rust tokenizer cannot be changed while another thread uses it
            try:
                if strategy:
                    self._tokenizer.enable_truncation(
                        limit, stride=stride, strategy=strategy, direction=self.truncation_side
                    )
                if filling:
                    self._tokenizer.enable_padding(
                        length=limit if filling == "max_length" else None,
                        direction=side("padding_side", padding_side or self.padding_side),
                        pad_id=self.pad_token_id,
                        pad_token=self.pad_token,
                        pad_type_id=self.pad_token_type_id,
                        pad_to_multiple_of=pad_to_multiple_of,
                    )
                encodings = self._tokenizer.encode_batch(
                    texts, is_pretokenized=is_split_into_words, add_special_tokens=add_special_tokens
                )
            except TypeError:
                raise unreadable(texts) from None
            except BaseException as error:  # the Rust library raises Exception itself, and panics beside Exception
                if type(error) is not Exception and type(error).__name__ != "PanicException":
                    raise
                raise ValueError(f"truncation={truncation!r}, max_length={limit}, stride={stride}: {error}") from None
            finally:
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()
        pieces = [[e, *e.overflowing] if return_overflowing_tokens else [e] for e in encodings]
        flat = [piece for group in pieces for piece in group]
        columns: dict[str, list[Any]] = {"input_ids": [e.ids for e in flat]}
        if return_token_type_ids:
            columns["token_type_ids"] = [e.type_ids for e in flat]
        if return_attention_mask:
            columns["attention_mask"] = [e.attention_mask for e in flat]
        if return_special_tokens_mask:
            columns["special_tokens_mask"] = [e.special_tokens_mask for e in flat]
        if return_offsets_mapping:
            columns["offset_mapping"] = [e.offsets for e in flat]
        if return_length:
            columns["length"] = [len(e) for e in flat]
        if return_overflowing_tokens:
            columns["overflow_to_sample_mapping"] = [i for i, group in enumerate(pieces) for _ in group]
        if return_tensors is not None:
            return BatchEncoding(as_tensors(columns, return_tensors), flat)
        if not batched and not return_overflowing_tokens:
            return BatchEncoding({name: column[0] for name, column in columns.items()}, flat)
        return BatchEncoding(columns, flat)

    def _limit(self, strategy: str | None, filling: str | None, asked: int | None, stride: int, paired: bool) -> int:
        """How many tokens a sequence may have, or is padded to."""
        if not strategy and filling != "max_length":
            if asked is not None:
                raise ValueError(f"max_length={asked} does nothing without truncation=True or padding='max_length'")
            return 0
        limit = self.model_max_length if asked is None else asked
        if limit >= NO_LIMIT:
            raise ValueError("this tokenizer has no model_max_length to truncate or pad to: pass max_length=")
        room = limit - self.num_special_tokens_to_add(paired)
        if strategy and room < 1:
            raise ValueError(f"max_length={limit} has no room for a token beside the {limit - room} special ones")
        if strategy and not 0 <= stride < room:
            raise ValueError(f"stride={stride} does not fit max_length={limit}; it may be 0 to {room - 1}")
        return limit

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return self._tokenizer.num_special_tokens_to_add(pair)

    def encode(self, text: Text, text_pair: Text | None = None, **options: Any) -> Any:
        """The `input_ids` of one text; options are those of `__call__`."""
        return self(text, text_pair, **options)["input_ids"]

    def tokenize(self, text: str, pair: str | None = None, *, add_special_tokens: bool = False) -> list[str]:
        """The pieces of a text, and of its pair."""
        return self(text, pair, add_special_tokens=add_special_tokens).tokens()

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or a list of ids; of what is no token, `unk_token_id`."""
        if isinstance(tokens, str):
            number = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_special_tokens_mask(
        self,
        token_ids_0: Sequence[int],
        token_ids_1: Sequence[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 for every special token: of ids that have them or, by default, of those that will be added."""
        if already_has_special_tokens:
            if token_ids_1 is not None:
                raise ValueError(
                    "token_ids_1 was given with already_has_special_tokens: the ids are one sequence then"
                )
            special = set(self.all_special_ids)
            return [int(number in special) for number in as_list(token_ids_0)]
        second = [] if token_ids_1 is None else [*[0] * len(token_ids_1), 1]
        return [1, *[0] * len(token_ids_0), 1, *second]

    # Ids to texts ----------------------------------------------------------------------------------------------------

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or a list of tokens.

        Raises:
            ValueError: an id that is none.
        """
        numbers = as_list(ids)
        if isinstance(numbers, int):
            return self._tokenizer.id_to_token(self._checked([numbers])[0])
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self._tokenizer.id_to_token(number) for number in self._checked(numbers) if number not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return self._tokenizer.decoder.decode(list(tokens))

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of ids, or a list of texts for a batch of them; a list, an array or a tensor.

        Raises:
            ValueError: an id that is none, such as the -100 of ignored labels.
        """
        numbers = as_list(token_ids)
        if isinstance(numbers, int):
            numbers = [numbers]
        if numbers and not isinstance(numbers[0], int):
            return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in numbers]
        text = self._tokenizer.decode(self._checked(numbers), skip_special_tokens=skip_special_tokens)
        clean = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        return joined(text) if clean else text

    def batch_decode(
        self,
        sequences: Iterable[Any],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in sequences]

    def _checked(self, ids: list[int]) -> list[int]:
        for number in ids:
            if number not in self._ids:
                raise ValueError(f"{number} is no token id; this tokenizer has 0 to {self._ids[-1]}")
        return ids

    # Batches ---------------------------------------------------------------------------------------------------------

    def pad(
        self,
        encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool = True,
        return_tensors: str | None = None,
    ) -> BatchEncoding:
        """Bring encoded sequences to one length; what a data collator calls.

        Args:
            encoded_inputs: a list of encodings, or an encoding of lists.  Keys that a tokenizer does not make, such as
                labels, are kept as they are.
            padding: True or "longest", "max_length", or False.
            max_length: what "max_length" pads to; by default `model_max_length`.  The others do not read it.
            return_tensors: "pt", "np", or None for what came in.

        Raises:
            ValueError: encodings without input_ids or with unlike keys, or that do not make a tensor.
        """
        rows, batched = as_rows(encoded_inputs)
        filling = chosen("padding", padding, PADDING)
        right = side("padding_side", padding_side or self.padding_side) == "right"
        lengths = [len(row["input_ids"]) for row in rows]
        wanted = max(lengths, default=0)
        if filling == "max_length":
            wanted = self._limit(None, filling, max_length, 0, paired=False)
        wanted += -wanted % (pad_to_multiple_of or 1)
        fills = {
            "input_ids": self.pad_token_id,
            "attention_mask": 0,
            "token_type_ids": self.pad_token_type_id,
            "special_tokens_mask": 1,
        }
        columns: dict[str, list[Any]] = {name: [] for name in rows[0]} if rows else {}
        if return_attention_mask and rows:
            columns.setdefault("attention_mask", [])
        for row, length in zip(rows, lengths, strict=True):
            for name, column in columns.items():
                value = row[name] if name in row else [1] * length
                if filling and name in fills:
                    more = [fills[name]] * (wanted - length)
                    value = [*value, *more] if right else [*more, *value]
                column.append(value)
        kind = return_tensors or (kind_of(encoded_inputs) if batched else None)
        if kind is not None:
            return BatchEncoding(as_tensors(columns, kind))
        return BatchEncoding(columns if batched else {name: column[0] for name, column in columns.items()})

    # Files -----------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | PathLike[str]) -> tuple[str, ...]:
        """Write tokenizer.json, tokenizer_config.json and vocab.txt, which bertlite and transformers load.

        The folder is replaced in one step: a crash leaves the old one or the new one.  Other files in it are kept.

        Returns:
            The paths of what was written.  A vocabulary whose ids have gaps has no vocab.txt.
        """
        folder = Path(folder)
        words = sorted(self._tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
        with replacing(folder, superseded=SUPERSEDED) as new:
            self._tokenizer.save(str(new / "tokenizer.json"))
            config = json.dumps(self._config(), indent=2, ensure_ascii=False) + "\n"
            (new / "tokenizer_config.json").write_text(config, encoding="utf-8")
            if [number for _, number in words] == list(range(len(words))):
                (new / "vocab.txt").write_text(
                    "".join(f"{word}\n" for word, _ in words), encoding="utf-8", newline="\n"
                )
            written = sorted(path.name for path in new.iterdir())
        return tuple(str(folder / name) for name in written)

    def _config(self) -> dict[str, Any]:
        """What goes into tokenizer_config.json."""
        added = self.added_tokens_decoder
        more = [token for token in self.all_special_tokens if token not in self.special_tokens_map.values()]
        return {
            "added_tokens_decoder": {
                str(number): {"content": token.content, **{flag: getattr(token, flag) for flag in FLAGS}}
                for number, token in added.items()
            },
            **{name: getattr(self, name) for name in SETTINGS},
            **self.special_tokens_map,
            **({"additional_special_tokens": more} if more else {}),
            "model_max_length": self.model_max_length,
            "tokenizer_class": "BertTokenizer",
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


# What goes in --------------------------------------------------------------------------------------------------------


def side(name: str, value: str) -> str:
    if value not in SIDES:
        raise ValueError(f"{name} is {value!r}; it must be {' or '.join(SIDES)}")
    return value


def chosen(name: str, value: Any, table: Mapping[Any, str | None]) -> str | None:
    if value not in table:
        raise ValueError(f"{name}={value!r} is unknown; have: {', '.join(map(repr, table))}")
    return table[value]


def as_batch(text: Any, pair: Any, split: bool) -> tuple[list[Any], bool]:
    """The texts, those with pairs as tuples, and whether they came as a list.

    Raises:
        ValueError: they are no texts.
    """
    listed = isinstance(text, list | tuple)
    batched = listed and (not split or (len(text) > 0 and isinstance(text[0], list | tuple)))
    if not listed and (split or not isinstance(text, str)):
        wanted = "a list of words, or several" if split else "a string, or a list of them"
        raise ValueError(f"the text is {text!r:.80}, a {type(text).__name__}; expected {wanted}")
    if not batched:
        texts = [text] if pair is None else [(text, pair)]
    elif pair is None:
        texts = [tuple(each) if is_pair(each, split) else each for each in text]
    elif isinstance(pair, list | tuple) and len(pair) == len(text):
        texts = list(zip(text, pair, strict=True))
    else:
        count = len(pair) if isinstance(pair, list | tuple) else f"a {type(pair).__name__}"
        raise ValueError(f"there are {len(text)} texts but text_pair is {count}; give one for each")
    return texts, batched


def is_pair(text: Any, split: bool) -> bool:
    if not isinstance(text, list | tuple) or len(text) != 2:
        return False
    return not split or all(isinstance(part, list | tuple) for part in text)


def unreadable(texts: Iterable[Any]) -> ValueError:
    """What is wrong with texts that the Rust tokenizer refuses."""
    for i, text in enumerate(texts):
        for part in text if isinstance(text, tuple) else (text,):
            for word in part if isinstance(part, list | tuple) else (part,):
                if not isinstance(word, str):
                    return ValueError(f"text {i} holds {word!r:.80}, a {type(word).__name__}; expected a string")
                try:
                    word.encode()
                except UnicodeEncodeError as error:
                    found = word[error.start]
                    return ValueError(f"text {i} holds {found!a}, half a character: decode it with errors='replace'")
    return ValueError(
        "the texts are neither all strings nor all pairs; a text that is split into words needs is_split_into_words"
    )


def as_rows(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """One dict of lists and numbers per sequence, and whether there were several."""
    if isinstance(given, Mapping):
        columns = {name: as_list(column) for name, column in given.items()}
        ids = columns.get("input_ids")
        if isinstance(ids, list) and ids and not isinstance(ids[0], list):
            return [columns], False
        counts = {name: len(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"these are not of one batch: {', '.join(f'{n} {name}' for name, n in counts.items())}")
        if ids is not None:
            return [{name: as_list(column[i]) for name, column in columns.items()} for i in range(len(ids))], True
        rows = [columns]
    else:
        rows = [{name: as_list(value) for name, value in row.items()} for row in given]
    for row in rows:
        if "input_ids" not in row:
            raise ValueError(f"an encoding to pad has {', '.join(row) or 'nothing'}; it needs input_ids")
        if row.keys() != rows[0].keys():
            odd = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            raise ValueError(f"some encodings have {odd} and others do not: remove it, or give it to all")
    return rows, True


def kind_of(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str | None:
    """Whether ids came as tensors ("pt") or arrays ("np")."""
    first = given if isinstance(given, Mapping) else given[0] if given else {}
    ids = first.get("input_ids")
    if isinstance(ids, list) and ids:
        ids = ids[0]
    return "pt" if isinstance(ids, torch.Tensor) else "np" if hasattr(ids, "__array__") else None


# What comes out ------------------------------------------------------------------------------------------------------


def as_list(value: Any) -> Any:
    """Lists and numbers of Python for a tensor, an array or what is made of them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [as_list(each) for each in value] if value and not isinstance(value[0], int | str) else list(value)
    return value


def as_tensors(columns: Mapping[str, list[Any]], kind: str) -> dict[str, Any]:
    """(B, …) tensors or arrays of int64, or of what the numbers are.

    Raises:
        ValueError: another kind is asked for, or rows have different lengths.
    """
    if kind not in ("pt", "np"):
        raise ValueError(f"return_tensors={kind!r} is unknown; have: 'pt', 'np', or None for lists")
    import numpy as np

    made: dict[str, Any] = {}
    for name, column in columns.items():
        try:
            made[name] = torch.tensor(column) if kind == "pt" else np.array(column)
        except (ValueError, TypeError):
            lengths = sorted({len(row) for row in column if isinstance(row, list)})
            if len(lengths) < 2:
                raise ValueError(f"{name} makes no tensor; it holds {column[0]!r:.80}: remove it first") from None
            raise ValueError(
                f"{name} has rows of {lengths[0]} to {lengths[-1]} and makes no tensor: pass padding=True when"
                " encoding, and a collator that pads it (DataCollatorForTokenClassification pads labels)"
            ) from None
    return made


def joined(text: str) -> str:
    """Text without the spaces that English puts neither before marks nor in contractions, as transformers 4 does."""
    for spaced in CONTRACTIONS[:4]:
        text = text.replace(spaced, spaced[1:])
    text = text.replace(" ' ", "'")
    for spaced in CONTRACTIONS[4:]:
        text = text.replace(spaced, spaced[1:])
    return text


# Files ---------------------------------------------------------------------------------------------------------------


def numbered(vocab: Sequence[str] | PathLike[str] | str) -> dict[str, int]:
    """{token: id} of a vocab.txt, one token per line, or of a list; the last of equals counts, as in transformers.

    Raises:
        ValueError: the file is not UTF-8, or empty.
    """
    if isinstance(vocab, str | PathLike):
        try:
            lines = Path(vocab).read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{vocab} is no vocabulary: it is not UTF-8 ({error})") from None
        vocab = [line.rstrip() for line in lines]
    if not any(vocab):
        raise ValueError("the vocabulary is empty")
    return {token: number for number, token in enumerate(vocab)}


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or cut short ({error}): fetch it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def read_vocabulary(path: Path, place: Any) -> dict[str, Any]:
    """What a vocab.txt says, and the added_tokens.json that transformers 4 put beside it."""
    beside = place.get("added_tokens.json")
    added = {} if beside is None else {index(number): {"content": t} for t, number in read_json(beside).items()}
    return {"vocab": numbered(path), "added_tokens": added}


def read_tokenizer(path: Path) -> dict[str, Any]:
    """What a tokenizer.json says, but for its padding and truncation.

    Raises:
        ValueError: it is damaged, or works in another way than BERT's.
    """
    values = read_json(path)
    model, normalizer, splitter = ((values.get(key) or {}) for key in ("model", "normalizer", "pre_tokenizer"))
    # Before 2021 a model did not state its type; WordPiece's is the only one with a longest word.
    parts = {
        "model": (model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else None), "WordPiece"),
        "prefix": (model.get("continuing_subword_prefix", "##"), "##"),
        "normalizer": (normalizer.get("type"), "BertNormalizer"),
        "pre_tokenizer": (splitter.get("type"), "BertPreTokenizer"),
    }
    for part, (found, wanted) in parts.items():
        if found != wanted:
            raise ValueError(f"{path} is no BERT's: its {part} is {found}, not {wanted}; transformers may load it")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{path} has no vocabulary")
    return {
        "vocab": vocab,
        "added_tokens": {token["id"]: token for token in values.get("added_tokens") or ()},
        "unk_token": model["unk_token"],
        "max_input_chars_per_word": model.get("max_input_chars_per_word", 100),
        **{ours: normalizer[theirs] for theirs, ours in NORMALIZER.items() if theirs in normalizer},
    }


def read_config(place: Any, found: Path) -> dict[str, Any]:
    """What tokenizer_config.json and, of special tokens, special_tokens_map.json say: arguments of the constructor.

    Raises:
        ValueError: it is another kind of tokenizer's.
    """
    paths = [place.get(name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    tokens, config = (read_json(path) if path is not None else {} for path in paths)
    kind = config.get("tokenizer_class") or "BertTokenizer"
    if kind not in CLASSES:
        raise ValueError(f"{paths[1]} is a {kind}'s; bertlite has BertTokenizer: transformers loads this one")
    if config.get("do_basic_tokenize") is False:
        raise ValueError(f"{paths[1]} has do_basic_tokenize false, which only transformers 4's slow tokenizer honours")
    named = {role: text_of(values[role]) for values in (tokens, config) for role in ROLES if values.get(role)}
    limit = config.get("model_max_length", config.get("max_len"))
    return {
        **{name: config[name] for name in SETTINGS if name in config},
        **named,
        **({} if limit is None else {"model_max_length": int(limit)}),
        "added_tokens": {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()},
    }


def text_of(token: Any) -> str:
    """A token as the files write it: a string, or an object with its content."""
    return token["content"] if isinstance(token, dict) else token
