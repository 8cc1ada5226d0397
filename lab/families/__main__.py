"""The table of families on docs/families.md: `python -m lab.families`, twenty minutes on one core.

`--registry` looks for the members again (two minutes); `--only "timm resnet,timm vgg"` tries these families and leaves the
other rows as they are.
"""

import argparse
import datetime
import sys

import torch

from lab.families import page
from lab.families.registry import names_by_family, smallest
from lab.families.trial import try_family


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = page.read()
    members = kept.members
    if options.registry or not members:
        members = tuple(smallest(family, names) for family, names in names_by_family().items())
    rows = {row.family: row for row in kept.rows}
    for member in members:
        if not member.convolutional or (options.only and member.family not in options.only.split(",")):
            continue
        row = rows[member.family] = try_family(member)
        apart = " ".join(f"{each:.1e}" for each in row.apart)
        print(
            f"{row.family}: {row.name} {row.shape} {apart} {row.error} {row.seconds:.0f} s", file=sys.stderr, flush=True
        )
        page.write(page.Kept(f"{datetime.date.today():%-d %B %Y}", page.versions(), members, tuple(rows.values())))


if __name__ == "__main__":
    main()
