"""``trireme data``: makes the tokens of a recipe's data once, and shows what is in them."""

from __future__ import annotations

from argparse import Namespace

from launcher.cli.arguments import settings_of
from launcher.cli.ask import asker


def data(given: Namespace) -> int:
    """Makes the tokens of a recipe's data, in all cores, or shows what is in them.

      prepare  tokenises text and looks at token ids that exist already, once: every later run finds what was
               made, in data.cache_dir, or below run.root. Interrupted, it goes on where it was. A run does
               the same before its ranks start
      show     documents, tokens, how many steps an epoch has, some of the text, and what is wrong

    Examples:
      trireme data prepare recipe.yaml
      trireme data show quickstart
      trireme data show quickstart data=text 'data.source=texts/**' data.tokenizer=tokenizer.json
    """
    from launcher.app.data import prepare_all, show_data  # imports hydra, which the help does not need
    from launcher.app.output import TERMINAL
    from launcher.app.planning import make_plan

    planned = make_plan(given.recipe, settings_of(given), allow=asker(trusts=given.trust))
    work = prepare_all if given.action == "prepare" else show_data
    work(planned.plan, TERMINAL, planned.composed.sources)
    return 0
