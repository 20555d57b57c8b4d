"""What a benchmark asks of a watched scaler at its end: that it measured what it says."""

import os
import sys

import torch

from ampwatch.guard import failures
from ampwatch.stats.choose import AUTO, weigh


def must_have_run(scaler: torch.amp.GradScaler) -> None:
    """Ends the benchmark with 1 if anything of ours failed, or the statistics were taken by another pass.

    A pass that fails once is given up for good, so the one that stands at the end has run at every attempt. The one
    that was to run is `AMPWATCH_STATS`, or what `auto` picks here.
    """
    watch = vars(scaler)["_ampwatch"]
    asked = os.environ.get("AMPWATCH_STATS") or AUTO
    named = weigh(asked, torch.device(scaler._device).type).name if asked == AUTO else asked
    ran = watch._pass.name
    if failures or ran != named:
        sys.exit(
            f"the pass {named!r} was to run, {ran!r} stood at the end; failures of ours: {dict(failures)}"
        )
