"""The arguments of `bertlite attention`."""

from bertlite.cli.parts import Commands, command, integers

DESCRIPTION = """\
Draw how each head of a model shares its attention out among the tokens of a text, as an HTML page to point and click
at, or as a PNG.  Heads have the numbers of the unpruned model; pruned ones are blank."""


def add(commands: Commands) -> None:
    attention = command(
        commands,
        "attention",
        "bertlite.attention_view",
        what="draw what the heads of a model look at in a text",
        description=DESCRIPTION,
        record="the tokens and all weights",
    )
    attention.add_argument("text", help="what the model reads")
    attention.add_argument("--model", required=True, help="a hub id or a folder, with its tokenizer")
    attention.add_argument("--revision", help="a branch, tag or commit of the hub")
    attention.add_argument("--pair", metavar="TEXT", help="a second text, after the first one's [SEP]")
    attention.add_argument("--layers", type=integers, metavar="A-B,…", help="which layers (default: all)")
    attention.add_argument("--heads", type=integers, metavar="A-B,…", help="which heads of them (default: all)")
    attention.add_argument("--out", required=True, metavar="FILE", help=".html, or .png, which needs bertlite[plot]")
