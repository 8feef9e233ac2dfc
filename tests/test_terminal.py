"""The commands as a user runs them: the examples of every --help; progress on a terminal, Ctrl-C, completion."""

import _thread
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import threading
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import SPECIAL, make
from test_cli import LEAVES  # type: ignore[import-not-found]

import bertlite
from bertlite.cli import main
from bertlite.shipping.onnx import PACKAGES

for library in ("transformers", "accelerate", "datasets", "matplotlib", "pyarrow"):
    if find_spec(library) is None:
        pytest.skip(f"an example needs {library}", allow_module_level=True)

fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))  # which Windows does not have
WORDS = [*SPECIAL, "good", "bad", "film", "plot", "the", "a", "is", "who", "cat", "sat"]
COLUMNS, LINES = 100, 40
BAR = re.compile(r"\d+%\|.*\| *[\d.]+/[\d.]+ \[\d\d:\d\d<\d\d:\d\d, +[\d.]+ ?[a-z/ ]+\]")  # a rate, and the time left
BEGUN = r"run: .*\| *[1-9]\d*/\d+ \["  # a bar with a cell that is done


EXAMPLES = [example for each in LEAVES.values() for example in each.examples]
ORDER = {"prune to": 1, "evaluate": 2, "convert fast": 2, "export fast": 2}  # they read models that others make
EXAMPLES.sort(key=lambda example: max((n for name, n in ORDER.items() if example.startswith(name)), default=0))
FIRST = [each for each in EXAMPLES if each in {leaf.examples[0] for leaf in LEAVES.values()}]  # of each command


def make_home(folder: Path) -> Path:
    """Write everything that the examples name into a folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "max_position_embeddings": 512}
    model = make(bertlite.BertForSequenceClassification, num_labels=2, **sizes).float()
    hub = ("google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2")
    for name in (*hub, "my-model", "dense"):
        model.save_pretrained(folder / name)
        bertlite.BertTokenizer(WORDS).save_pretrained(folder / name)
    pruned = bertlite.prune_heads(bertlite.BertModel.from_pretrained(folder / "dense"), {0: [1], 2: range(4)})
    pruned.save_pretrained(folder / "pruned")
    shutil.copy(folder / "dense" / "tokenizer.json", folder / "pruned")
    for name, count in (("train", 520), ("dev", 23)):
        rows = [f"{'good' if i % 3 else 'bad'} {WORDS[5 + i % 10]}\t{int(i % 3 > 0)}\n" for i in range(count)]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    rows = [json.dumps({"text": f"the {WORDS[5 + i % 10]} sat"}) for i in range(300)]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    texts = [f"the {WORDS[5 + i % 10]} sat {i % 7 * 'on the cat '}\n" for i in range(520)]
    (folder / "texts.txt").write_text("".join(texts))
    for name in "ab":
        (folder / f"{name}.txt").write_text("the cat sat\nwho is bad\n")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def at_home(home, monkeypatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("bertlite.experiments.speed.TIMING", 0.1)


def as_here(example: str, home: Path) -> list[str]:
    """Return the words of an example, with less work: its measurements are short, its proof of one case."""
    words = shlex.split(example)
    if words[:2] == ["prune", "to"] and not words[2].endswith("%"):
        words[2] = "60%"  # most of the time of so small a model is Python's
    if "--distil" in words:
        words[words.index("--distil") + 1] = "0.5"
    if words[0] == "parity":
        words = ["parity", *([] if words[1:2] and not words[1].startswith("-") else ["my-model"]), *words[1:]]
        words += ["--only", "BertModel-sdpa-padded-float64"]
    return words


def good_ends(words: list[str]) -> tuple[int, ...]:
    """Return the exit statuses of a command that has done its work; models of random weights predict one class."""
    return (0, 1) if words[:2] == ["prune", "to"] else (0,)


def outputs_of(words: list[str]) -> list[str]:
    return words[words.index("--out") + 1].split(",") if "--out" in words else []


def on_terminal(*words: str, interrupt: str = "") -> tuple[object, str]:
    """Return the exit status of a command and what the terminal was sent.

    Args:
        interrupt: a pattern; when the terminal has shown it, Ctrl-C is typed.
    """
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    output = b""

    def read() -> None:
        nonlocal output
        typed = False
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:  # Linux says so when a terminal is closed
                return
            output += part
            if interrupt and not typed and re.search(interrupt.encode(), output):
                typed = True
                _thread.interrupt_main()

    screen = threading.Thread(target=read)
    screen.start()
    status: object = None
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with open(writer, "w", buffering=1) as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
            try:
                status = main(words)
            except SystemExit as end:
                status = end.code
    finally:
        signal.signal(signal.SIGINT, handler)
        screen.join()
        os.close(reader)
    return status, output.decode()


@pytest.mark.parametrize("examples", [FIRST, pytest.param(EXAMPLES, marks=pytest.mark.slow)], ids=["first", "all"])
def test_examples_run_on_a_terminal_and_write_what_they_name(
    examples, few_rounds, tmp_path, monkeypatch, capsys
) -> None:
    """In one test, since later ones read what earlier ones wrote."""
    monkeypatch.setattr("bertlite.experiments.budget.search.CLOCK_ROUNDS", 3)
    home = make_home(tmp_path)  # of its own, since what is there already is not written again
    monkeypatch.chdir(home)
    for example in examples:
        words = as_here(example, home)
        if words[0] == "export" and (examples is FIRST or not all(map(find_spec, PACKAGES))):  # it takes long
            continue
        status, output = on_terminal(*words)
        assert status in good_ends(words), (example, output)
        assert [path for path in outputs_of(words) if not Path(path).exists()] == [], example
        if "--json" in words:
            assert json.loads(output[output.index("{\r\n") :])["what"] == f"bertlite {words[0]}"
        if words[:2] in (["prune", "finetune"], ["prune", "run"]):
            assert BAR.search(output), (example, output)
    assert main(["convert", "fast", "--full", "--out", "all-heads"]) == 0
    capsys.readouterr()
    assert main(["inspect", "all-heads", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bertlite"]["outcome"] == "same"


def test_the_bar_is_gone_when_the_work_is_done() -> None:
    status, output = on_terminal("embed", "my-model", "corpus.jsonl", "--out", "bar", "--max-tokens", "40")
    assert status == 0
    bars = [line for line in re.split(r"[\r\n]+", output) if line.startswith("embed:")]  # transformers reports too
    assert "embed:   0%|" in bars[0]
    assert max(map(len, bars)) <= COLUMNS
    last = output.rstrip().splitlines()[-2].rpartition("\r")[2]
    assert last.startswith("bar: 300 rows, 32 numbers each, complete")


def test_ctrl_c_ends_long_work_without_a_traceback(home) -> None:
    grid = ["--fractions", "0.1,0.2,0.3,0.4,0.5,0.6,0.7", "--seeds", ",".join(map(str, range(40)))]
    data = ["--train", "train.tsv", "--dev", "dev.tsv", "--criteria", "michel", "--calibration", "8"]
    words = ["prune", "run", "my-model", *data, *grid, "--out", "stopped"]
    status, output = on_terminal(*words, interrupt=BEGUN)
    assert status == 130, output
    assert "Traceback" not in output
    assert any((home / "stopped").glob("*/run.json"))


# Completion ----------------------------------------------------------------------------------------------------------


COMPLETED = {
    "bertlite p": ["pack", "parity", "prune"],
    "bertlite prune f": ["finetune"],
    "bertlite prune run --rep": ["--repairs"],
    "bertlite prune run --task r": ["regression"],
    "bertlite embed my-model --backend n": ["native"],
    "bertlite prune to 2x my-model --dtype b": ["bfloat16"],
    "bertlite parity --device c": ["cpu", "cuda"],
    "bertlite inspect my-": ["my-model"],
    "bertlite prune run my-model --train tr": ["train.tsv"],
    "bertlite prune zzz": [],
}


def test_bash_completes(capsys) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    script = [capsys.readouterr().out, "complete -p bertlite > /dev/null || exit 1"]
    for line in COMPLETED:
        script.append(f"COMP_WORDS=({line}) COMP_CWORD={len(line.split()) - 1} COMP_LINE={shlex.quote(line)}")
        script.append(f'COMP_POINT={len(line)} COMPREPLY=()\n_shtab_bertlite\necho "${{COMPREPLY[@]}}"')
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, check=True)
    assert [sorted(found.split()) for found in done.stdout.splitlines()] == [*COMPLETED.values()]
