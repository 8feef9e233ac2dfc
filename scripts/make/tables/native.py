"""Tables of the native kernels: what each step brings, and what rounding costs on tasks."""

from scripts.make.tables.read import SPREAD, measured_on, records, rows, spread


def steps() -> str:
    """Table of the time without each step over the time with it."""
    (record,) = records("native_steps.json")
    sections = record["sections"]
    names = list(dict.fromkeys(pair.partition(" / ")[0] for each in sections.values() for pair in each["ratios"]))
    body = [
        [
            name,
            *(
                spread(each["ratios"], f"{name} / as it is") if f"{name} / as it is" in each["ratios"] else ""
                for each in sections.values()
            ),
        ]
        for name in names
    ]
    return "\n".join(
        [
            rows(["time over that of the kernels as they are", *sections], body),
            "",
            f"{SPREAD} {record['layers']} layers of bert-base's shape, instructions {record['set']},"
            f" {measured_on(record)}.",
        ]
    )


def accuracy() -> str:
    """Table of each task's metric in each dtype."""
    (record,) = records("native_accuracy.json")
    tasks = record["results"]
    ways = list(next(iter(tasks.values()))["points"])
    head = ["", *(f"{name}: {found['metric']}, {found['examples']:,} examples" for name, found in tasks.items())]
    body = [["as it is, float32", *(f"{found['plain']:.2f}" for found in tasks.values())]]
    body += [
        [
            way,
            *(
                f"{found['points'][way]:.2f} ({found['points'][way] - found['plain']:+.2f})"
                for found in tasks.values()
            ),
        ]
        for way in ways
    ]
    return "\n".join([rows(head, body), "", f"MiniLM, {measured_on(record)}."])
