"""Random step records for the tests of whatever reads them."""

from dataclasses import replace

import numpy as np

from policy.step import ModelState, StepRecord, TokenOffer

DRAFTERS, LENGTHS = ("none", "ngram", "eagle3"), (0, 8, 4)


def random_step(rng, req_ids, finished=frozenset(), drafters=DRAFTERS, wild=1.0):
    """A step of these requests; `wild` scales the values, beyond the bounds where it is large."""
    rows = len(req_ids)

    def integers(low, high):
        return rng.integers(low, int(high * wild) + 1, rows).astype(np.int32)

    drafter = rng.integers(0, len(drafters), rows).astype(np.int32)
    num_drafts = np.array(
        [rng.integers(1, (*LENGTHS, 8)[d] + 1) if d else 0 for d in drafter], np.int32
    )
    num_accepted = np.array([rng.integers(0, n + 1) for n in num_drafts], np.int32)
    survival = np.full((rows, max(LENGTHS)), np.nan, np.float32)
    for row in range(rows):
        if drafters[drafter[row]] == "eagle3":
            drafted = np.cumprod(rng.random(num_drafts[row]))
            survival[row, : num_drafts[row]] = drafted
    offer = TokenOffer(
        integers(0, 4), integers(0, 8), integers(-1, 8), rng.random(rows).astype(np.float32)
    )
    known = np.cumprod(rng.random((rows, max(LENGTHS))), axis=1).astype(np.float32)
    known[np.arange(max(LENGTHS)) >= offer.num_draft_tokens[:, None]] = np.nan
    state = ModelState(rng.random(rows) < 0.7, integers(0, 500), survival)
    return StepRecord(
        num_running_reqs=rows + int(rng.integers(0, 3 * wild)),
        num_waiting_reqs=int(rng.integers(0, 9 * wild)),
        kv_cache_usage=float(rng.random() * wild),
        num_prefill_tokens=int(rng.integers(0, 2) * rng.integers(0, 4000 * wild)),
        num_scheduled_tokens=int(num_drafts.sum()) + rows,
        req_ids=tuple(req_ids),
        num_context_tokens=integers(1, 2000),
        num_emitted_tokens=num_accepted + np.int32(1),
        temperature=(rng.integers(0, 2, rows) * rng.random(rows) * wild).astype(np.float32),
        drafter=drafter,
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_accepted,
        finished_req_ids=finished,
        token_offers={
            name: told
            for name, told in (("ngram", offer), ("suffix", replace(offer, survival=known)))
            if name in drafters
        },
        model_states={"eagle3": state} if "eagle3" in drafters else {},
    )


def random_history(seed, steps, drafters=DRAFTERS, wild=1.0):
    """Requests join, pause, leave and come back under their old name."""
    rng = np.random.default_rng(seed)
    alive, gone, born, history = [], [], 0, []
    for _ in range(steps):
        finished = {req_id for req_id in alive if rng.random() < 0.05}
        alive = [req_id for req_id in alive if req_id not in finished]
        gone += sorted(finished)
        if not alive or (len(alive) < 7 and rng.random() < 0.3):
            if gone and rng.random() < 0.3:
                alive.append(gone.pop(0))
            else:
                alive.append(f"request-{born}")
                born += 1
        present = [req_id for req_id in alive if rng.random() < 0.9] or alive[:1]
        rng.shuffle(present)
        history.append(random_step(rng, present, frozenset(finished), drafters, wild))
    return history


def held_bytes(thing):
    """Bytes of every array, and places of every container, reachable from an object."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        return len(thing) + sum(held_bytes(value) for value in thing.values())
    if isinstance(thing, list | tuple | set):
        return len(thing) + sum(held_bytes(value) for value in thing)
    if hasattr(thing, "__dict__"):
        return held_bytes(vars(thing))
    return 0


def step_of(drafts, num_context_tokens=100, **changes):
    """A step that tells only what a test says.

    Args:
        drafts: `(drafter, draft tokens, accepted tokens)` of each row.
        num_context_tokens: Of every row.
        changes: Other fields of the record; `offers` and `states` are rows of the n-gram drafter's
            `TokenOffer` and of `(fresh, pending tokens)` of the EAGLE head.
    """
    drafter, num_drafts, num_accepted = np.array(drafts, np.int32).reshape(-1, 3).T
    rows = len(drafter)
    offers = np.array(changes.pop("offers", [(0, 0, -1)] * rows), np.int32).reshape(-1, 3)
    fresh, pending = np.array(changes.pop("states", [(1, 1)] * rows), np.int32).reshape(-1, 2).T
    survival = np.full((rows, max(LENGTHS)), np.nan, np.float32)
    fields = {
        "num_running_reqs": rows,
        "num_waiting_reqs": 0,
        "kv_cache_usage": 0.1,
        "num_prefill_tokens": 0,
        "num_scheduled_tokens": int(num_drafts.sum()) + rows,
        "req_ids": tuple("abcdefgh"[:rows]) if rows <= 8 else tuple(map(str, range(rows))),
        "num_context_tokens": np.full(rows, num_context_tokens, np.int32),
        "num_emitted_tokens": num_accepted + np.int32(1),
        "temperature": np.zeros(rows, np.float32),
        "drafter": drafter,
        "num_draft_tokens": num_drafts,
        "num_accepted_tokens": num_accepted,
        "token_offers": {"ngram": TokenOffer(*offers.T, np.zeros(rows, np.float32))},
        "model_states": {"eagle3": ModelState(fresh.astype(bool), pending, survival)},
    }
    return StepRecord(**{**fields, **changes})
