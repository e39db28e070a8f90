"""Tables of three hospitals whose honest nodes look like outliers near convergence.

Column orders differ. Only gamma, the smallest hospital, has palliative patients, so the
other two are indifferent to a parameter that gamma depends on."""

import csv
from pathlib import Path

import numpy as np

COLUMNS = {
    "alpha": ("age", "bmi", "crp", "sex", "ward", "outcome"),
    "beta": ("outcome", "ward", "sex", "crp", "bmi", "age"),
    "gamma": ("ward", "age", "outcome", "crp", "sex", "bmi"),
}
PATIENTS = {"alpha": 400, "beta": 300, "gamma": 64}
LOWEST_LOSS = 0.197
"""Mean training loss of softmax regression at its minimum; ln 2 = 0.693 at the start."""


def write_hospitals(folder: Path) -> Path:
    """Write a table for each hospital; the columns predict a relapse, with some noise."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(11)
    for site, patients in PATIENTS.items():
        age = rng.integers(18, 95, patients)
        bmi = rng.normal(26, 4, patients).round(1)
        crp = rng.lognormal(1.2, 0.8, patients).round(2)
        ward = rng.choice(["surgery", "medicine"], patients)
        if site == "gamma":
            ward = np.where(rng.random(patients) < 0.4, "palliative", ward)
        risk = 0.08 * (age - 55) + 0.2 * (bmi - 26) + 1.2 * np.log(crp) - 1.5
        risk -= 3.0 * (ward == "palliative")
        relapses = risk + rng.normal(0, 0.6, patients) > 0
        table = {
            "age": age.astype(str),
            "bmi": bmi.astype(str),
            "crp": crp.astype(str),
            "sex": rng.choice(["f", "m"], patients),
            "ward": ward,
            "outcome": np.where(relapses, "relapse", "healthy"),
        }
        order = COLUMNS[site]
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(order)
            writer.writerows(zip(*(table[name] for name in order), strict=True))
    return folder


def read_hospital(folder: Path, site: str) -> tuple[list[dict[str, str]], list[str]]:
    """Return the rows of a hospital without their outcomes, and the outcomes."""
    with (folder / f"{site}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, [row.pop("outcome") for row in rows]
