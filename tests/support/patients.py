"""Hospital tables with an ID, a date, categories and missing values.

The table of one site has its columns in another order."""

import csv
from pathlib import Path

import numpy as np

SITES = ("east", "north", "south", "west")
COLUMNS = ("patient", "visit", "age", "sex", "bmi", "crp", "smoker", "outcome")
OTHER_ORDER = ("outcome", "crp", "sex", "age", "patient", "smoker", "bmi", "visit")
"""Column order of the south's table."""


def write_patients(folder: Path, rows: int = 120) -> Path:
    """Write a table for each site; the columns predict a relapse, with some noise."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    for number, site in enumerate(SITES):
        age, bmi = rng.integers(18, 95, rows), rng.normal(26, 4, rows).round(1)
        crp, smoker = (
            rng.lognormal(1 + 0.2 * number, 0.8, rows).round(2),
            rng.choice(["never", "former", "now"], rows),
        )
        risk = (
            0.07 * (age - 55)
            + 0.2 * (bmi - 26)
            + 1.2 * np.log(crp)
            + 1.5 * (smoker == "now")
            - 1.5
        )
        relapses = risk + rng.normal(0, 0.5, rows) > 0
        table = {
            "patient": [f"{site[0].upper()}-{place:04}" for place in range(rows)],
            "visit": [
                f"2024-{1 + place % 12:02}-{1 + place % 28:02}" for place in range(rows)
            ],
            "age": age.astype(str),
            "sex": rng.choice(["f", "m"], rows),
            "bmi": np.where(rng.random(rows) < 0.1, "NA", bmi.astype(str)),
            "crp": np.where(rng.random(rows) < 0.05, "", crp.astype(str)),
            "smoker": np.where(rng.random(rows) < 0.05, "?", smoker),
            "outcome": np.where(relapses, "relapse", "healthy"),
        }
        order = OTHER_ORDER if site == "south" else COLUMNS
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(order)
            writer.writerows(zip(*(table[name] for name in order), strict=True))
    return folder
