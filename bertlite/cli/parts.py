"""The parts that all commands share: their tables, help, --out and --json, and lists."""

import argparse
import atexit
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

from bertlite.cli.work import Work
from bertlite.support.files import check_is_folder, write_json

Commands: TypeAlias = Any  # the type that argparse's add_subparsers returns has no public name
AddTo: TypeAlias = Callable[[Any], object]  # adds an option, or several, to a parser

FOLDER = "FOLDER"  # a kind of output: a path with any other suffix
RECORD = ".json"
PATHS = ("CHECKPOINT", "DATA", "FILE", "FOLDER", "INPUT", "PATH[,PATH]")  # metavars of paths
FILES = re.compile(  # suffixes of files, which a folder is not named with
    r"\.(npy|npz|parquet|arrow|csv|tsv|te?xt|jsonl?|ndjson|zip|gz|tar|tgz|safetensors|bin|pth?|onnx|pkl|h5|html|md|png|svg)"
)
COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "int8")  # to compute in
INFERENCE_BACKENDS = ("auto", "native", "graphs", "plain")  # which optimize_for_inference takes
FOOT = """\
Exit status: 0 for success; 1 if something differs, is worse, or cannot be loaded; 2 if the command could not run, with
the reason on standard error; 130 if interrupted; 141 if its output was closed."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Wrap each paragraph at the terminal's width, except indented lines, such as examples; show defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        blocks = (block if "\n  " in block else fill(block, width, indent) for block in text.split("\n\n"))
        return "\n\n".join(blocks)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_it = action.nargs == 0 or action.default in (None, (), {})  # then the text itself names the default
        return action.help if says_it else super()._get_help_string(action)


def fold(line: str, indent: str = "  ") -> str:
    """Return a command in lines of at most 76 characters, which a shell joins; lines are broken before options."""
    lines: list[str] = []
    for part in re.split(r" (?=-)", line):
        if lines and len(f"{lines[-1]} {part}") <= 74:
            lines[-1] += f" {part}"
        else:
            lines.append(f"{indent}{part}" if lines else part)
    return " \\\n".join(lines)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated options, whose errors have one line and name the nearest word."""

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=HelpFormatter)
        self.color = False  # Python 3.14 would write escapes
        self.examples = tuple(f"{self.prog.removeprefix('bertlite ')} {example}" for example in examples)
        shown = "".join(f"{fold(f'  {self.prog} {example}', '    ')}\n" for example in examples)
        self.epilog = f"examples:\n{shown}\n{FOOT}" if examples else FOOT

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and refuse unknown options here: only a command's own parser can name the nearest option.

        Without arguments, a parser of several commands prints its help.
        """
        if not args and subcommands(self):
            self.print_help()
            self.exit()
        found, others = super().parse_known_args(args, namespace)
        if others:
            takes_two = "--against" in self._option_string_actions and not others[0].startswith("-")
            hint = "; write a text with spaces in quotes, and a second checkpoint after --against" if takes_two else ""
            self.error(f"unrecognized arguments: {' '.join(others)}{hint}")
        return found, others

    def error(self, message: str) -> NoReturn:
        """Print a message, with the command, option or value nearest to an unknown word, and exit with status 2."""
        unknown = re.search(r"(?:unrecognized arguments: |invalid choice: ')([\w.%+-]+)", message)
        word, commands = unknown[1] if unknown else "", subcommands(self)
        near = get_close_matches(word, [*commands, *self._option_string_actions], n=1)
        for option, action in self._option_string_actions.items():  # --int8 is --dtype int8
            if word.startswith("--") and word[2:] in (action.choices or ()):
                near = [f"{option} {word[2:]}"]
        if word[:1].isdigit() and "to" in commands:  # a target
            near = [f"`{self.prog} to {word}`"]
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}{hint} (see `{self.prog} --help`)\n")


def subcommands(parser: Parser) -> dict[str, Parser]:
    """Return the commands of a parser by name; empty if it is a command itself."""
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(groups[0].choices) if groups else {}


def add_completion(top: Parser) -> None:
    """Add --print-completion to the parser of all commands, if shtab is installed."""
    if find_spec("shtab") is None:
        return
    import shtab

    shtab.add_argument_to(top, "--print-completion", help="print a script that completes commands in a shell")
    todo = [top]
    while todo:
        parser = todo.pop()
        todo += subcommands(parser).values()
        for action in parser._actions:
            if action.metavar in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it


def option(spec: str, words: str, kind: Callable[[str], Any] | None = None, **given: Any) -> AddTo:
    """Return an option or a positional argument of a command.

    Args:
        spec: its names and the name of its value, as in --help: "-o --out PATH", or "text TEXT" for an argument.
        words: its help.
        kind: the parser of its value.
    """
    parts = spec.split()
    own = [part for part in parts if part.startswith("-")] or parts[:1]
    shown = {"metavar": parts[-1]} if len(parts) > len(own) else {}
    known = {"help": words, **shown, **({"type": kind} if kind else {}), **given}
    return lambda parser: parser.add_argument(*own, **known)


def group(title: str, *options: AddTo, description: str | None = None) -> AddTo:
    """Return options with a heading of their own in --help."""

    def add(parser: Any) -> None:
        headed = parser.add_argument_group(title, description)
        for each in options:
            each(headed)

    return add


def flag(spec: str, words: str) -> AddTo:
    """Return an option without a value."""
    return option(spec, words, action="store_true")


def checkpoint_option(words: str = "a hub id or a folder, with its tokenizer", **more: Any) -> AddTo:
    return option("checkpoint CHECKPOINT", words, **more)


class Devices(tuple[str, ...]):
    """The kinds of devices; a number chooses one, as in cuda:1."""

    def __contains__(self, name: object) -> bool:
        return re.fullmatch(r"cpu|cuda(:\d+)?", str(name)) is not None


def device_option(words: str = "cpu or cuda") -> AddTo:
    return option("--device NAME", words, default="cpu", choices=Devices(("cpu", "cuda")))


def dtype_option(words: str, known: Sequence[str] = COMPUTE_DTYPES, **more: Any) -> AddTo:
    return option("--dtype NAME", words, choices=known, **more)


def backend_option(words: str) -> AddTo:
    return option("--backend NAME", words, choices=INFERENCE_BACKENDS)


CHECKPOINT, DEVICE = checkpoint_option(), device_option()


class Addable(Protocol):
    """A command, or a module of several."""

    def add(self, commands: Commands) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the work that it does, and a table of its options.

    Work gets the options: `args.out` holds the paths to write, {kind: path}; a kind is a suffix, or FOLDER.
    `args.folder` and `args.html` are paths among them, and `args.record` the path of the record; each may be None.

    Args:
        summary: its line in the list of commands.
        description: the text of --help; by default the summary.
        examples: the words after the command's name.
        record: the content of the record that --json prints, and that --out FILE.json writes.
        out: {kind: content} of other outputs of --out.
        starts: a line printed on standard error before the imports, since importing torch takes seconds; without it
            a terminal alone gets one.
        settings: a value whose fields are the defaults of the options with these names.
    """

    name: str
    work: Work
    summary: str
    description: str = ""
    examples: Sequence[str]
    record: str
    out: Mapping[str, str] = field(default_factory=dict)
    starts: str = ""
    options: Sequence[AddTo] = ()
    settings: Any = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of paths one of which --out must name: a folder, or else the files that it can write."""
        return (FOLDER,) if FOLDER in self.out else (*self.out, RECORD) if self.out else ()

    def add(self, commands: Commands) -> None:
        """Add a parser of this command's options."""
        text = self.description or f"{self.summary[0].upper()}{self.summary[1:]}."
        parser: Parser = commands.add_parser(self.name, help=self.summary, description=text, examples=self.examples)

        kinds = {**self.out, RECORD: self.record}
        written = f"write {'; '.join(f'{kind}: {content}' for kind, content in kinds.items())}"
        must = FOLDER in self.out  # else --json may print a record instead
        if not must:
            written += "; required without --json" if self.out else " (default: nothing is written)"

        # All commands have these, at the same place of --help.
        out = option("--out PATH[,PATH]", written, paths(kinds), default={}, required=must)
        json = flag("--json", "print the record on standard output, and the rest on standard error")
        quiet = flag("-q --quiet", "print only errors on standard error: no progress and no warnings")
        for add in (out, json, quiet, *self.options):
            add(parser)

        # Defaults come from the settings; a list is shown as a user writes it.
        given = {} if self.settings is None else vars(self.settings)
        lists = {name: ",".join(value) for name, value in given.items() if isinstance(value, tuple) and value}
        parser.set_defaults(**{**given, **lists}, asked=self, parser=parser)

    def run(self, args: argparse.Namespace) -> int:
        """Do the work, write its record, and print its lines; return the exit status."""
        if self.starts or sys.stderr.isatty():
            shown = {name: " ".join(x) if isinstance(x, list) else x for name, x in vars(args).items() if x}
            line = self.starts or "loading {checkpoint}"
            print(line.format(**{"checkpoint": "torch", **shown}), file=sys.stderr, flush=True)
        record, lines, status = self.work(args)
        if args.record and record is not None:
            write_json(args.record, record)
        for each in lines:
            print(each)
        return status


def check_writable(kind: str, path: Path) -> None:
    """Raise OSError if an output of this kind cannot be written at a path, before the work starts."""
    if kind == FOLDER:
        check_is_folder(path)
    elif path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file to write")
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"nothing can be written at {path}: {error.strerror}; name another place with --out") from None


# Types of arguments --------------------------------------------------------------------------------------------------


def paths(kinds: Iterable[str]) -> Callable[[str], dict[str, Path]]:
    """Return a parser of "a.json,b.png" into {".json": Path("a.json"), ".png": Path("b.png")}."""

    def parse(text: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for part in names(text):
            suffix = Path(part).suffix.lower()
            kind = suffix if suffix in kinds else FOLDER
            if kind not in kinds:
                raise argparse.ArgumentTypeError(f"{part!r} has none of the suffixes {', '.join(kinds)}")

            # A folder with the suffix of a file is more likely a mistake.
            path = Path(part).expanduser()
            if kind == FOLDER and FILES.fullmatch(suffix) and not path.is_dir():
                raise argparse.ArgumentTypeError(
                    f"{part!r} is named as a file, and a folder is written: name it without {suffix}"
                )
            if kind in found:
                raise argparse.ArgumentTypeError(f"{text!r} names two paths of the kind {kind}; give one of each")
            found[kind] = path
        return found

    return parse


def readable(text: str) -> str:
    """Return the path of a file; copy a pipe, or standard input for -, first: inputs are read twice."""
    if text != "-" and not (Path(text).is_fifo() or Path(text).is_char_device()):
        return text
    copy = Path(tempfile.mkdtemp(prefix="bertlite-"), "pipe.txt")
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    with open(0 if text == "-" else text, "rb", closefd=text != "-") as pipe, copy.open("wb") as file:
        shutil.copyfileobj(pipe, file)
    return str(copy)


def names(text: str) -> tuple[str, ...]:
    """Parse "a,b" into ("a", "b")."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item; write a list as A,B,C")
    return found


def names_of(what: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of a list of names, each of which must be in `known`."""

    def parse(text: str) -> tuple[str, ...]:
        found = names(text)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; have: {', '.join(known)}")
        return found

    return parse


def integers(text: str) -> tuple[int, ...]:
    """Parse "0,2,7" into (0, 2, 7)."""
    return tuple(map(integer, names(text)))


def numbers(text: str) -> tuple[float, ...]:
    """Parse "0.5,1" into (0.5, 1.0)."""
    return tuple(map(number, names(text)))


def shape(text: str) -> tuple[int, int]:
    """Parse "8x128" into (8, 128)."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text, re.ASCII)
    if sizes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write sequences x tokens, such as 8x128")
    return int(sizes[1]), int(sizes[2])


def integer(text: str) -> int:
    """Parse an integer, 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def count(text: str) -> int:
    """Parse an integer, 1 or more."""
    found = integer(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; it must be 1 or more")
    return found


def number(text: str) -> float:
    """Parse a finite number, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= found < math.inf:  # nan too
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of 0 or more")
    return found
