"""BERT's tokenizer on the `tokenizers` library, with the names and the results of transformers' BertTokenizer.

A text is cleaned, lower-cased or not, and split at spaces, punctuation and Chinese characters.  Each word is cut into
the longest pieces that the vocabulary has; pieces inside a word begin with ##.  A tokenizer.json with other parts,
such as Unigram or BPE, is used unchanged.  The Rust tokenizer, `backend_tokenizer`, keeps no padding or truncation
between calls: if a tokenizer.json states them, only their sides have an effect.

Letters:  B sequences · S positions, padding included
"""

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self

from bertlite.checkpoint.files import CONFIG_FILES, Source, first_existing
from bertlite.checkpoint.hub import push_folder
from bertlite.runtime.processing import Processing
from bertlite.support.habits import check_habits, habit_hint, refuse_others
from bertlite.support.kinds import checked
from bertlite.tokenizer import encoding, files
from bertlite.tokenizer.encoding import BatchEncoding, Ids, Text, look_up, to_lists
from bertlite.tokenizer.files import NO_LIMIT, NORMALIZER, ROLES, SIDES
from bertlite.tokenizer.sentences import read_sentences

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from tokenizers import AddedToken


class BertTokenizer:
    """Turn texts into token ids and back, as transformers' BertTokenizer.

    Its vocabulary and settings are chosen when it is made; only `add_tokens` changes them.  It can be pickled and
    shared by threads.  `pad_token`, `pad_token_id` and so on are None if there is no such token.

    Args:
        vocab: {token: id}, the tokens in the order of their ids, or a vocab.txt.
        do_lower_case: lower-case the text.
        strip_accents: remove accents; None follows `do_lower_case`.
        tokenize_chinese_chars: make each Chinese character a word.
        unk_token, sep_token, pad_token, cls_token, mask_token: the special tokens; each has an id.
        bos_token, eos_token: special tokens that BERT does not use.
        model_max_length: the length, in tokens, that `truncation=True` truncates to.
        padding_side, truncation_side: "right" or "left".

    Raises:
        ValueError: a special token is not in the vocabulary, or a setting has an unknown value.
    """

    model_input_names: ClassVar[list[str]] = ["input_ids", "token_type_ids", "attention_mask"]
    clean_up_tokenization_spaces: bool = False
    truncation_side: str
    sentences = Processing()
    _stated: Mapping[str, Any] = MappingProxyType({})  # stated by its tokenizer_config.json

    def __init__(
        self,
        vocab: Mapping[str, int] | Sequence[str] | PathLike[str],
        *,
        do_lower_case: bool = True,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        unk_token: str = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str = "[MASK]",
        bos_token: str | None = None,
        eos_token: str | None = None,
        model_max_length: int = NO_LIMIT,
        padding_side: str = "right",
        truncation_side: str = "right",
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "vocab")}
        self._set_up(files.word_pieces(vocab if isinstance(vocab, Mapping) else files.number_tokens(vocab)), given)

    def _set_up(self, content: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Make the tokenizer of the content of a tokenizer.json, and of the arguments of `__init__`."""
        self.do_lower_case, self.strip_accents, self.tokenize_chinese_chars = map(given.get, NORMALIZER)  # BERT's
        for name in SIDES:
            setattr(self, name, look_up(name, given[name], encoding.DIRECTIONS))
        self.model_max_length = given["model_max_length"]
        self.special_tokens_map = {role: given[role] for role in ROLES if given.get(role) is not None}
        self.backend_tokenizer = files.make_backend(content, given, self.special_tokens_map)  # it does the work
        self._lock = threading.RLock()

    @classmethod
    @checked
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
        """Load the tokenizer of a checkpoint.

        tokenizer_config.json overrides tokenizer.json, as in transformers.  If it does not state `do_lower_case`, that
        is True, whatever tokenizer.json states.  If neither limits the length, the model's positions do.
        `encode_texts` also follows sentence-transformers' files, which are read into `sentences`.

        Args:
            source: a hub id, a folder, or a vocab.txt or tokenizer.json, whose folder has its settings.  For a model's
                config.json or weights it is the tokenizer in their folder.
            revision, subfolder, cache_dir, token, local_files_only: as for `huggingface_hub`.
            settings: arguments of the constructor that replace the files'.

        Raises:
            FileNotFoundError: there is no such checkpoint, or it has neither tokenizer.json nor vocab.txt.
            ValueError: a file is damaged, the tokenizer needs Python code, or a setting is for BERT's parts only.
            TypeError: the constructor does not take a setting.
        """
        place = Source.of(source, revision, subfolder, None, cache_dir, token, local_files_only).place
        path = Path(source).expanduser()
        weights = path.name.endswith((".safetensors", ".bin", ".index.json"))
        beside = not path.is_file() or path.name in CONFIG_FILES or weights
        found = first_existing(place, ["tokenizer.json", "vocab.txt"] if beside else [path.name])

        # Wrong arguments are refused before a file is read.
        check_habits(settings)
        inspect.signature(cls).bind_partial(**settings)  # raises TypeError for an unknown one

        with files.errors_with_path(found):
            content, stated, config = files.read_files(place, found)
            fixed = ", ".join(sorted(settings.keys() - {*files.ARGUMENTS}))
            if fixed and "do_lower_case" not in stated:
                raise ValueError(f"{fixed} cannot be set: the parts are not BERT's; change them in the file")

            # Settings of the call override the files'.
            tokenizer = cls.__new__(cls)
            tokenizer._set_up(content, {**stated, **settings})
            tokenizer.backend_tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))

            vars(tokenizer).update(
                _stated={name: value for name, value in config.items() if name not in files.NOT_KEPT},
                model_input_names=files.input_names(place, config),
                clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces")),
                sentences=read_sentences(place, tokenizer.model_max_length, files.read_positions(place)),
            )

            # The config may name more special tokens than tokenizer.json holds.
            if lacking := [each for each in files.extra_tokens(config) if each not in tokenizer.all_special_tokens]:
                tokenizer.add_tokens(lacking, special_tokens=True)
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        """Return the token of a role, or its id."""
        role = name.removesuffix("_id")
        if role not in ROLES:
            raise AttributeError(f"{type(self).__name__} has no {name!r}{habit_hint(name)}")
        token = self.special_tokens_map.get(role)
        return token if role == name or token is None else self.backend_tokenizer.token_to_id(token)

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Return {token: id}, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens of `special_tokens_map`, then those added as special."""
        added = sorted(self.backend_tokenizer.get_added_tokens_decoder().items())
        special = [token.content for _, token in added if token.special]
        return list(dict.fromkeys([*self.special_tokens_map.values(), *special]))

    def add_tokens(
        self, new_tokens: "str | AddedToken | Sequence[str | AddedToken]", special_tokens: bool = False
    ) -> int:
        """Add whole words that are never cut, as transformers does; `save_pretrained` keeps them.

        A token of the vocabulary keeps its id, others get the ids after the last one: then give the model embeddings
        for them with `model.resize_token_embeddings(len(tokenizer))`.

        Args:
            new_tokens: one or several; a `tokenizers.AddedToken` says how it is matched.
            special_tokens: `decode(skip_special_tokens=True)` leaves them out, and text is not normalised to match.

        Returns:
            The number of added tokens; empty ones, and ones added before, do not count.
        """
        from tokenizers import AddedToken

        tokens = [new_tokens] if isinstance(new_tokens, str | AddedToken) else list(new_tokens)
        last, backend = max(self.get_vocab().values()), self.backend_tokenizer
        if last != len(self) - 1:
            raise ValueError(f"the ids go to {last} for {len(self)} tokens: they have gaps, which would be filled")
        with self._lock:
            return (backend.add_special_tokens if special_tokens else backend.add_tokens)(tokens)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or a list of ids; `unk_token_id` if the vocabulary lacks it."""
        if isinstance(tokens, str):
            number = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Ids) -> Any:
        """Return the token of an id, or a list of tokens; raise ValueError for a number that is no token's id."""
        numbers = to_lists(ids)
        if not isinstance(numbers, int):
            return [self.convert_ids_to_tokens(number) for number in numbers]
        token = None if numbers < 0 else self.backend_tokenizer.id_to_token(numbers)
        if token is None:
            raise ValueError(f"{numbers} is not a token id; this tokenizer has {len(self)} tokens, from 0")
        return token

    def decode(self, token_ids: Ids, skip_special_tokens: bool = False) -> Any:
        """Return the text of ids, a list, an array or a tensor, or a list of texts for a batch of them.

        A number that is no token's id, such as the -100 of ignored labels, is a ValueError.  If tokenizer_config.json
        says `clean_up_tokenization_spaces`, spaces before punctuation are removed, except with BPE; transformers
        4.57.6 removes these too.
        """
        numbers = to_lists(token_ids)
        if numbers and isinstance(numbers, list) and isinstance(numbers[0], list):
            return [self.decode(row, skip_special_tokens) for row in numbers]
        numbers = [numbers] if isinstance(numbers, int) else numbers
        self.convert_ids_to_tokens(numbers)  # raises for ids that the Rust tokenizer ignores
        text = self.backend_tokenizer.decode(numbers, skip_special_tokens=skip_special_tokens)
        cleans = self.clean_up_tokenization_spaces and type(self.backend_tokenizer.model).__name__ != "BPE"
        for after in encoding.CLEANED if cleans else ():
            text = text.replace(f" {after}", after.rstrip())
        return text

    def __call__(
        self,
        text: Text | Sequence[Text] | Sequence[tuple[Text, Text]],
        text_pair: Text | Sequence[Text] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str | None = False,
        truncation: bool | str | None = False,
        max_length: int | None = None,
        is_split_into_words: bool = False,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        **habits: Never,
    ) -> BatchEncoding:
        """Encode one text, a list of them, or pairs.

        Args:
            text: a string, or a list of strings or of pairs; if `is_split_into_words`, one list of words, or several.
            text_pair: the second text, after the first [SEP], or a list with one for each text.
            padding: True or "longest", to the longest of these texts; "max_length"; or False.
            truncation: True or "longest_first", the longer one of a pair; "only_first"; "only_second"; or False.
            max_length: a length in tokens, special ones included; by default `model_max_length`.
            return_tensors: "pt", "np" or None, for lists.
            return_token_type_ids, return_attention_mask: by default True if in `model_input_names`.

        Returns:
            `input_ids`, `token_type_ids` and `attention_mask`: (B, S) as tensors, else lists; flat lists for one text
            without `return_tensors`.

        Raises:
            ValueError: texts, a strategy or a max_length are not valid, or rows of unequal length cannot be a tensor.
            TypeError: there is no such argument; the way to an argument of transformers is named.
        """
        refuse_others("tokenizer", habits)
        texts, batched = encoding.read_texts(text, text_pair, is_split_into_words)
        strategy = look_up("truncation", truncation, encoding.TRUNCATION)
        target = look_up("padding", padding, encoding.PADDING)

        # The limit leaves room for the special tokens that frame one text or a pair.
        paired = len(texts) > 0 and isinstance(texts[0], tuple)
        framing = self.backend_tokenizer.num_special_tokens_to_add(paired) if add_special_tokens else 0
        limit = self._limit(strategy, target, max_length, framing)
        if target and self.pad_token is None:
            raise ValueError("this tokenizer has no padding token: pass pad_token= when it is made")

        with self._lock:  # the Rust tokenizer cannot be changed while another thread uses it
            backend = self.backend_tokenizer
            try:
                with encoding.explained_errors(f"truncation={truncation!r}, max_length={limit}", texts):
                    if strategy:
                        backend.enable_truncation(limit, strategy=strategy, direction=self.truncation_side)
                    if target:
                        pad = {"pad_id": self.pad_token_id, "pad_token": self.pad_token}
                        length = limit if target == "max_length" else None
                        backend.enable_padding(direction=self.padding_side, length=length, **pad)

                    encodings = backend.encode_batch(texts, is_split_into_words, add_special_tokens)
            finally:
                backend.no_truncation()
                backend.no_padding()

        # The model reads the columns that its tokenizer_config names, unless the call says otherwise.
        asked = {"input_ids": True, "token_type_ids": return_token_type_ids, "attention_mask": return_attention_mask}
        batch = BatchEncoding(encodings=encodings)
        for name, wanted in asked.items():
            if name in self.model_input_names if wanted is None else wanted:
                column = [getattr(each, encoding.COLUMNS[name]) for each in encodings]
                flat = column if batched else column[0]
                batch[name] = flat if return_tensors is None else encoding.to_tensor(name, column, return_tensors)
        return batch

    @property
    def text_settings(self) -> dict[str, Any]:
        """All settings that turn texts into ids and back, without the tokenizer's parts; JSON-ready."""
        names, own = ("model_input_names", "model_max_length", *SIDES, "clean_up_tokenization_spaces"), self.sentences
        found = {name: getattr(self, name) for name in names}
        found |= {"truncation_side": own.truncation_side or self.truncation_side, "prompts": own.prompts}
        found |= {"default_prompt_name": own.default_prompt, "max_seq_length": own.max_length or None}
        return {**found, "do_lower_case": own.lower_case}

    def encode_texts(
        self,
        texts: Sequence[Text] | Sequence[tuple[Text, Text]],
        max_length: int | None = None,
        *,
        prompt: str | None = None,
        **options: Any,
    ) -> BatchEncoding:
        """Encode texts or pairs like the library that the checkpoint is for.

        If that is sentence-transformers, texts get the prompt of `sentences` (in a pair only the first does), and are
        lower-cased and truncated as it says.

        Args:
            max_length: the length, in tokens, to truncate to; None does not truncate.
            prompt: a prompt to use instead of the default one.
            options: arguments of `__call__`; lists of words get no prompt.

        Raises:
            ValueError: as for `__call__`; or sentence-transformers obeys an entry of its files that bertlite does not.
        """
        self.sentences.check()
        prompt, backend = self.sentences.prompt() if prompt is None else prompt, self.backend_tokenizer
        if prompt and not options.get("is_split_into_words"):
            texts = [f"{prompt}{t}" if isinstance(t, str) else (f"{prompt}{t[0]}", *t[1:]) for t in texts]
        options |= {} if max_length is None else {"truncation": True, "max_length": max_length}
        with self._lock, encoding.lower_casing(backend) if self.sentences.lower_case else nullcontext():
            own, self.truncation_side = self.truncation_side, self.text_settings["truncation_side"]
            try:
                return self(texts, **options)
            finally:
                self.truncation_side = own

    def _limit(self, strategy: str | None, target: str | None, max_length: int | None, framing: int) -> int:
        """Return the length of sequences with their `framing` special tokens; 0 for no limit."""
        if not strategy and target != "max_length":
            if max_length is not None:
                raise ValueError(
                    f"max_length={max_length} has no effect: pass truncation=True or padding='max_length'"
                )
            return 0
        limit = self.model_max_length if max_length is None else max_length
        if limit >= NO_LIMIT:
            raise ValueError("this tokenizer has no model_max_length to truncate or pad to: pass max_length=")
        if strategy and limit <= framing:
            raise ValueError(f"max_length={limit} has no room for a token between the {framing} special ones")
        return limit

    def encode(self, text: Text, text_pair: Text | None = None, **options: Any) -> Any:
        """Return the `input_ids` of one text, a list or as `return_tensors` says; options go to `__call__`."""
        return self(text, text_pair, **options)["input_ids"]

    def tokenize(self, text: str, pair: str | None = None, *, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text, and of its pair."""
        return self(text, pair, add_special_tokens=add_special_tokens).encodings[0].tokens

    @checked
    def save_pretrained(self, folder: str | PathLike[str]) -> tuple[str, ...]:
        """Write tokenizer.json, tokenizer_config.json and vocab.txt, which bertlite and transformers load.

        The folder is replaced in one step: a crash leaves the old one or the new one.  Other files in it are kept.
        Return the paths of the files.  Only WordPiece has a vocab.txt, and none whose ids have gaps.
        """
        return files.write_files(Path(folder).expanduser(), self.backend_tokenizer, self._config())

    def push_to_hub(self, repo_id: str, *, commit_message: str = "Upload tokenizer", **options: Any) -> "CommitInfo":
        """Upload the files that `save_pretrained` writes to the hub; options as for `BertModel.push_to_hub`."""
        return push_folder(self.save_pretrained, repo_id, commit_message=commit_message, **options)

    def _config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        more = [token for token in self.all_special_tokens if token not in self.special_tokens_map.values()]
        own, kind = self.do_lower_case is not None, self._stated.get("tokenizer_class") or "BertTokenizer"
        is_bert = kind.removesuffix("Fast") in files.BERT_CLASSES
        return {
            **self._stated,
            **{name: getattr(self, name) for name in (*SIDES, "model_input_names", *(NORMALIZER if own else ()))},
            **self.special_tokens_map,
            **({"additional_special_tokens": more} if more else {}),
            "model_max_length": self.model_max_length,
            "tokenizer_class": "BertTokenizer" if own else "PreTrainedTokenizerFast" if is_bert else kind,
        }

    def __repr__(self) -> str:
        return f"BertTokenizer({len(self)} tokens, do_lower_case={self.do_lower_case})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())
