"""The arguments of `bertlite attention`."""

from bertlite.cli.parts import Commands, command, integers

DESCRIPTION = """\
Draw the attention weights that each head of a model gives to the tokens of a text, as an interactive HTML page or as a
PNG.  Heads are numbered as in the unpruned model; pruned ones are blank."""


def add(commands: Commands) -> None:
    attention = command(
        commands,
        "attention",
        "bertlite.attention_view",
        summary="draw the attention weights of a model for a text",
        description=DESCRIPTION,
        record="the tokens and all weights",
    )
    attention.add_argument("text", help="the text for the model")
    attention.add_argument("--model", required=True, help="a hub id or a folder, with its tokenizer")
    attention.add_argument("--revision", help="a branch, tag or commit of the hub")
    attention.add_argument("--pair", metavar="TEXT", help="a second text, after the first one's [SEP]")
    attention.add_argument("--layers", type=integers, metavar="A-B,…", help="layers to draw (default: all)")
    attention.add_argument("--heads", type=integers, metavar="A-B,…", help="heads of these layers (default: all)")
    attention.add_argument("--out", required=True, metavar="FILE", help=".html, or .png, which needs bertlite[plot]")
