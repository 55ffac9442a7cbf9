"""The states that the watchdog takes for trouble, the actor it names, and the order of its measures."""

import msgspec

from troupellm.actors.engine.watchdog import PATIENCE, Looks, NoProgress, Pulse, Stuck, Watchdog
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.messages.snapshot import ActorSnapshot, MailboxSnapshot, SchedulerSnapshot


def pulse(depths: dict[str, int] | None = None, *, taken: int = 5, computing: bool = False, **scheduler: int) -> Pulse:
    """Every mailbox has had `taken` messages taken."""
    depths = depths or {}
    boxes = {
        name: MailboxSnapshot(name, depths.get(name, 0), 8, taken + depths.get(name, 0))
        for name in ("intake", "scheduler", "worker", "output", "metrics")
    }
    return Pulse(
        scheduler=SchedulerSnapshot(**scheduler),
        actors=tuple(ActorSnapshot(name, 0, (box,)) for name, box in boxes.items()),
        last_step=1.0,
        computing=computing,
    )


def twice(given: Pulse) -> Stuck | None:
    looks = Looks()
    looks.look(given)
    return looks.look(given)


def test_no_work_is_no_trouble() -> None:
    assert twice(pulse()) is None
    assert twice(pulse(paused=3)) is None


def test_a_step_that_is_computed_is_progress() -> None:
    assert twice(pulse(running=4, plans_in_flight=1, computing=True)) is None
    assert twice(pulse({"worker": 1}, running=4, computing=True)) is None


def test_the_actor_furthest_downstream_is_named_as_stuck() -> None:
    everybody = {"intake": 1, "scheduler": 2, "output": 3}
    assert twice(pulse(everybody)) == Stuck("output", "messages wait and none is taken")
    assert twice(pulse({"intake": 1, "scheduler": 2})) == Stuck("scheduler", "messages wait and none is taken")


def test_a_plan_or_a_result_that_was_lost() -> None:
    stuck = twice(pulse(running=1, plans_in_flight=1))
    assert stuck is not None
    assert stuck.actor == "worker"


def test_waiting_for_a_guide_or_an_adapter_is_no_trouble() -> None:
    assert twice(pulse(waiting=2, held=2)) is None
    assert twice(pulse(waiting=3, held=2)) is not None


def test_a_scheduler_that_plans_nothing() -> None:
    for state in ({"running": 1}, {"waiting": 1}, {"waiting": 1, "paused": 1}):
        stuck = twice(pulse(**state))
        assert stuck is not None
        assert stuck.actor == "scheduler"


def test_any_progress_resets_the_count_of_stuck_looks() -> None:
    looks = Looks()
    for _ in range(5):
        looks.look(pulse({"output": 1}))
    assert looks.looks == 4
    assert looks.look(pulse({"output": 1}, taken=6)) is None
    assert looks.looks == 0


def test_first_what_costs_nobody_anything_then_a_crash() -> None:
    done: list[object] = []
    given = [pulse(running=1)]
    dog = Watchdog(
        Mailbox("watchdog", 1),
        lambda: given[0],
        timeout=3.0,
        alarm=lambda text: done.append(("alarm", text)),
        mend=lambda stuck: done.append(("mend", stuck.actor)),
        crash=lambda name, error: done.append(("crash", name, type(error))),
    )
    for _ in range(3):
        dog.check()
    assert done == []
    dog.check()
    text = "no progress: scheduler: sequences could run and nothing is planned"
    assert done == [("alarm", text), ("mend", "scheduler")]
    for _ in range(PATIENCE):
        dog.check()
    assert done[2:] == [("crash", "scheduler", NoProgress)]
    given[0] = pulse()
    dog.check()
    assert done[3:] == [("alarm", None)]


def test_a_trouble_behind_another_one_has_the_gentle_measure_too() -> None:
    """The scheduler, once awake, finds the output actor deaf: nothing was tried against that yet."""
    done: list[str] = []
    given = [pulse({"scheduler": 1})]
    dog = Watchdog(
        Mailbox("watchdog", 1),
        lambda: given[0],
        timeout=3.0,
        alarm=lambda text: None,
        mend=lambda stuck: done.append(f"mend {stuck.actor}"),
        crash=lambda name, error: done.append(f"crash {name}"),
    )
    for _ in range(4):
        dog.check()
    assert done == ["mend scheduler"]
    given[0] = pulse({"output": 1})
    for _ in range(3 + PATIENCE):
        dog.check()
    assert done == ["mend scheduler", "mend output", "crash output"]


def test_the_state_that_is_logged_is_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(pulse(running=1)))["scheduler"]["running"] == 1
