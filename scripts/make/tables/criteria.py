"""The table of criteria, from the table that the library uses."""

from bertlite.importance.criteria import CRITERIA, Criterion


def table() -> str:
    head = "| criterion | score | of | needs | mean over |\n|---|---|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(cells(each))} |" for each in CRITERIA.values())])


def cells(criterion: Criterion) -> list[str]:
    source = f" ({criterion.source})" if criterion.source else ""
    needs = "nothing"
    if criterion.needs_data:
        needs = 'batches, and labels or `target="kl"`' if criterion.needs_loss else "batches"
    if criterion.kl_needs_teacher:
        needs += " with a `teacher`"
    return [
        f"`{criterion.name}`",
        (criterion.description + source).replace("|", "\\|"),
        " and ".join(f"{unit}s" for unit in criterion.units),
        needs,
        ", ".join(criterion.reductions()) if criterion.needs_data else "",
    ]
