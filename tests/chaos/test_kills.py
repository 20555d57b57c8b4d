"""A training job and its server, each killed with -9 again and again: nothing acknowledged is missing, nothing is
there twice, and the training comes to the same weights as one that nobody disturbed and nobody watched.

AMPWATCH_CHAOS_KILLS says how often each is killed; `make soak` says 50.
"""

import os
import random
import threading
import time

import numpy as np
from sites import settled

from ampwatch import spool

KILLS = int(os.environ.get("AMPWATCH_CHAOS_KILLS", "3"))
STEPS = 60 + 20 * KILLS


def train_and_kill(site, dice):
    """The last line of a job that was killed `KILLS` times and begun again each time."""
    job = "job", STEPS, str(site.folder / "checkpoint"), str(site.folder / "acknowledged")
    for _ in range(KILLS):
        running = site.start(*job).until_ready()
        time.sleep(dice.uniform(0.1, 0.5))
        running.kill()
    return site.start(*job).join()[-1]


def keep_killing(site, dice, done):
    """Servers that are killed, the last one excepted."""
    for _ in range(KILLS):
        server = site.serve()
        done.wait(dice.uniform(0.2, 1.5))
        server.kill()
    site.serve()


def attempts(batches):
    """How many attempts each producer has recorded, and that it recorded none of them twice."""
    found = {}
    for batch in batches:
        if batch.kind == "attempts":
            found.setdefault(batch.producer, []).extend(batch.table()["attempt"].tolist())
    assert all(len(numbers) == len(np.unique(numbers)) for numbers in found.values())
    return {producer: len(numbers) for producer, numbers in found.items()}


def test_job_and_server_killed_again_and_again(site):
    print("seed", seed := random.SystemRandom().randrange(2**32))
    plain, done = site.start("job", STEPS, str(site.folder / "undisturbed")), threading.Event()
    killer = threading.Thread(target=keep_killing, args=(site, random.Random(seed), done))
    killer.start()
    weights = train_and_kill(site, random.Random(seed + 1))
    done.set()
    killer.join()
    assert weights == plain.join()[-1]
    noted = (site.folder / "acknowledged").read_text().splitlines()
    acknowledged = {(p, int(seq), digest) for p, seq, digest in map(str.split, noted)}
    assert acknowledged <= site.stored()
    site.sync()
    assert site.stored() == site.spooled() >= acknowledged
    counted = attempts(spool.read(site.runs))
    assert 1 <= len(counted) <= KILLS + 1  # one that was killed in its first flush has left nothing

    def shown():
        producers = site.get("runs/r")["producers"]
        assert all(p["missing"] == [] for p in producers)
        return {p["producer"]: p["attempts"] for p in producers if p["attempts"]}

    assert settled(shown, counted) == counted
