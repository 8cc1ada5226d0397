"""The agreement state machine: single events, and random orders of messages, deaths and silences."""

import random
from dataclasses import dataclass, field

import pytest

from convoy.elastic.agreement import (
    Ask,
    Called,
    Event,
    Excluded,
    Gather,
    Generation,
    Granted,
    Interrupted,
    Lost,
    Meet,
    Member,
    Met,
    Missed,
    NotReached,
    Reached,
    Requested,
    Stop,
    Train,
    answer,
    enough,
    instruction,
    observe,
)

FOUR = Generation(0, (0, 1, 2, 3))


def after(me: int, *events: Event, generation: Generation = FOUR) -> Member:
    state = Member(me, generation)
    for event in events:
        state = observe(state, event)
    return state


@pytest.mark.parametrize(
    ("me", "events", "expected"),
    [
        (0, (), Train()),
        (1, (Interrupted(),), Ask(0)),
        (0, (Interrupted(),), Gather((1, 2, 3))),
        (1, (Lost(0, dead=True),), Gather((2, 3))),
        (2, (Lost(0, dead=True),), Ask(1)),
        (0, (Lost(3, dead=True), Requested(1, FOUR, 0)), Gather((2,))),
        (
            0,
            (Lost(3, dead=True), Requested(1, FOUR, 0), Requested(2, FOUR, 0)),
            Meet(Generation(1, (0, 1, 2)), hosts=True),
        ),
        (
            0,
            (Interrupted(), *(Requested(d, FOUR, 0) for d in (1, 2, 3))),
            Meet(Generation(1, (0, 1, 2, 3)), hosts=True),
        ),
        (1, (Interrupted(), Called(0, Generation(1, (0, 1)))), Meet(Generation(1, (0, 1)), hosts=False)),
        (1, (Interrupted(), Called(0, Generation(1, (0, 2)))), Ask(0)),  # not called
        (1, (Interrupted(), Called(2, Generation(1, (1, 2)))), Ask(0)),  # not by the leader
        (1, (Called(0, Generation(1, (0, 1))),), Train()),  # asked for no meeting
        (1, (Interrupted(), Called(0, Generation(1, (0, 1))), Missed()), Ask(0)),
        (
            1,
            (Interrupted(), Called(0, Generation(1, (0, 1))), Missed(), Called(0, Generation(1, (0, 1)))),
            Ask(0),
        ),  # stale
        (1, (Interrupted(), Called(0, Generation(1, (0, 1))), Met()), Train()),
        (0, (Granted((4, 5)),), Gather((1, 2, 3))),
        (2, (Granted((4, 5)),), Ask(0)),
        (
            0,
            (Interrupted(), Granted((4,)), *(Requested(d, FOUR, 0) for d in (1, 2, 3))),
            Meet(Generation(1, (0, 1, 2, 3)), True),
        ),
        (
            0,
            (Granted((4,)), *(Requested(d, FOUR, 0) for d in (1, 2, 3))),
            Meet(Generation(1, (0, 1, 2, 3, 4)), hosts=True),
        ),
        (
            0,
            (Granted((4,)), *(Requested(d, FOUR, 0) for d in (1, 2, 3)), Missed()),
            Gather((1, 2, 3, 4)),
        ),  # it was called
        (
            0,
            (Granted((4,)), Lost(3, dead=True), *(Requested(d, FOUR, 0) for d in (1, 2))),
            Meet(Generation(1, (0, 1, 2)), True),
        ),
        (1, (Interrupted(), Called(0, Generation(1, (0, 1, 4)))), Meet(Generation(1, (0, 1, 4)), hosts=False)),
        (0, (Requested(2, FOUR, 0),), Gather((1, 3))),
        (0, (Lost(1, dead=False), Requested(2, FOUR, 0)), Gather((3,))),
        (0, (Lost(1, dead=False), Requested(2, FOUR, 0), Requested(1, FOUR, 0)), Gather((3,))),  # it is there after all
        (1, (Lost(0, dead=False), Reached(0, FOUR)), Ask(0)),
        (1, (Lost(0, dead=True), Reached(0, FOUR)), Gather((2, 3))),
        (1, (Lost(0, dead=False), Reached(0, Generation(1, (0, 2)))), Gather((2, 3))),  # it is elsewhere already
    ],
)
def test_state_machine_answers_events(me: int, events: tuple[Event, ...], expected: object) -> None:
    assert instruction(after(me, *events)) == expected


def test_dead_joining_device_is_not_retried() -> None:
    asked = [Requested(d, FOUR, 0) for d in (1, 2, 3)]
    called = after(0, Granted((4,)), *asked)
    assert answer(called, 4) == Generation(1, (0, 1, 2, 3, 4))
    again = observe(observe(called, Missed()), Lost(4, dead=True))
    for event in asked:
        again = observe(again, event)
    assert instruction(again) == Meet(Generation(2, (0, 1, 2, 3)), hosts=True)


def test_at_most_as_many_devices_join_as_there_are_members() -> None:
    alone = observe(Member(0, Generation(0, (0,))), Granted((1, 2, 3)))
    assert instruction(alone) == Meet(Generation(1, (0, 1)), hosts=True)


def test_silent_device_learns_that_it_was_removed() -> None:
    state = after(0, Lost(3, dead=False), Requested(1, FOUR, 0), Requested(2, FOUR, 0), Met())
    assert state.generation == Generation(1, (0, 1, 2))
    assert answer(state, 3) == Generation(1, (0, 1, 2))
    woken = after(3, Interrupted(), Excluded(Generation(1, (0, 1, 2))))
    assert isinstance(instruction(woken), Stop)
    assert instruction(observe(woken, Interrupted())) == instruction(woken)


@pytest.mark.parametrize(
    ("members", "dead", "goes_on"),
    [
        ((0, 1, 2), {3}, True),
        ((0, 1), set(), True),  # half, with the lowest
        ((2, 3), set(), False),
        ((3,), {0, 1, 2}, True),  # nobody else is alive
        ((3,), {0, 1}, False),  # 2 may be
        ((2,), {0, 1}, True),  # half of those that may be alive, and the lowest of them
        ((1, 2), {0}, True),
    ],
)
def test_a_part_of_the_fleet_continues_only_if_no_other_can(
    members: tuple[int, ...], dead: set[int], goes_on: bool
) -> None:
    assert enough(members, FOUR, frozenset(dead)) is goes_on


def test_a_leader_without_a_majority_stops() -> None:
    state = after(3, *(Lost(d, dead=False) for d in (0, 1, 2)))
    told = instruction(state)
    assert isinstance(told, Stop)
    assert "cannot be reached" in told.reason


@dataclass
class World:
    """Devices with their machines, unordered messages, and a rendezvous that needs all of them."""

    dice: random.Random
    members: dict[int, Member]
    alive: set[int]
    awake: set[int]
    knocks: list[tuple[int, int]] = field(default_factory=list)  # (device, leader) on their way
    waits: dict[int, Generation] = field(default_factory=dict)  # who waits in which meeting
    generations: set[Generation] = field(default_factory=set)  # of which somebody is a member
    comes: list[int] = field(default_factory=list)  # joining that ask
    apart: set[frozenset[int]] = field(default_factory=set)  # pairs of which neither reaches the other
    patience: float = 0.0  # part of the questions to one that stands still whose time is not over yet
    hiccups: float = 0.0  # part of the questions that get no answer in time though the device is there

    def turn(self) -> None:
        device = self.dice.choice(sorted(self.alive & self.awake))
        state = self.members[device]
        if device in self.comes:
            self.knock(device)
            return
        if device in self.waits:
            self.meeting(self.waits[device])
            return
        match instruction(state):
            case Ask(leader):
                self.ask(device, leader)
            case Gather(missing):
                self.ask(device, self.dice.choice(missing), interrupts=True)
            case Meet(generation, _):
                self.waits[device] = generation
            case Train() if self.dice.random() < 0.1:
                peer = self.dice.choice(state.generation.members)
                if peer != device:
                    self.ask(device, peer, interrupts=True, beats=True)

    def ask(self, device: int, peer: int, *, interrupts: bool = False, beats: bool = False) -> None:
        state, theirs = self.members[device], self.members[peer]
        gone = peer not in self.alive or theirs.phase == "out"  # who cannot go on ends
        if not gone and peer not in self.awake and self.dice.random() < self.patience:
            return
        if gone or peer not in self.awake or {device, peer} in self.apart:
            self.members[device] = observe(state, Lost(peer, dead=gone and {device, peer} not in self.apart))
        elif self.dice.random() < self.hiccups:
            self.members[device] = observe(state, Lost(peer, dead=False))
        elif device not in theirs.generation.members:
            self.members[device] = observe(state, Excluded(theirs.generation))
        elif interrupts:
            if not beats:
                theirs = observe(theirs, Interrupted())
                self.members[peer] = observe(theirs, Reached(device, state.generation))
        else:
            asked = Requested(device, state.generation, state.highest, tuple(state.unreachable))
            self.members[peer] = theirs = observe(theirs, asked)
            called = answer(theirs, device)
            if called is not None and device in called.members and peer in self.waits and self.dice.random() < 0.8:
                self.members[device] = observe(state, Called(peer, called))

    def grow(self) -> None:
        """Let all agree between two steps to admit one device; some may have just lost their connection."""
        generations = {
            s.generation for d, s in self.members.items() if d in self.alive - {*self.comes} and s.phase == "training"
        }
        if not generations:
            return
        newest, newcomer = max(generations, key=lambda g: g.number), max(10, *self.members) + 1
        self.members[newcomer] = Member(newcomer, Generation(-1, (newcomer,)))
        if self.dice.random() < 0.8:  # or it is lost before it comes
            self.comes.append(newcomer)
            self.alive.add(newcomer)
            self.awake.add(newcomer)
        for device, state in list(self.members.items()):
            if device in self.alive & self.awake and device not in self.comes and state.generation == newest:
                event = Granted((newcomer,)) if self.dice.random() < 0.9 else Interrupted()
                self.members[device] = observe(state, event)

    def knock(self, device: int) -> None:
        """Send a join request to one device; receive a rendezvous, or a failed one."""
        for peer in sorted((self.alive & self.awake) - {*self.comes}):
            theirs = self.members[peer]
            called = theirs.called if peer in self.waits else None
            if called is not None and device in called.members:
                self.members[device] = Member(device, Generation(-1, (device,)), phase="meeting", called=called)
                self.waits[device] = called
                self.comes.remove(device)
                return
            if device in theirs.generation.members:
                self.members[device] = observe(Member(device, theirs.generation), Interrupted())
                self.comes.remove(device)
                return

    def meeting(self, generation: Generation) -> None:
        there = [d for d in generation.members if self.waits.get(d) == generation and d in self.alive & self.awake]
        cut = any(pair <= set(generation.members) for pair in self.apart)
        if len(there) == len(generation.members) and not cut:
            # It succeeds for each of them by itself: one may die, or hear too late, while others go on.
            for device in there:
                failed = self.dice.random() < 0.1
                self.members[device] = observe(self.members[device], Missed() if failed else Met())
                del self.waits[device]
                if not failed and generation not in self.generations:
                    self.generations.add(generation)
                    # Another one of this number may have been, of devices that have ended, all of them.
                    rest = {d for d in self.alive - {*generation.members} if self.members[d].phase == "training"}
                    assert all(self.members[d].generation.number < generation.number for d in rest)
        elif self.dice.random() < 0.05:  # its time is over for one of them
            device = self.dice.choice(there)
            del self.waits[device]
            # Also one that stands still for this moment only does not answer.
            answers = {d for d in generation.members if {d, device} not in self.apart and d in self.alive & self.awake}
            silent = frozenset(generation.members) - answers - {device}
            self.members[device] = observe(observe(self.members[device], Missed()), NotReached(silent))


def test_higher_rank_of_a_disconnected_pair_is_removed() -> None:
    state = after(0, *(Requested(d, FOUR, 0) for d in (1, 2, 3)), Missed())
    for device, unreachable in ((1, (2,)), (2, (1,)), (3, ())):
        state = observe(state, Requested(device, FOUR, 1, unreachable))
    assert instruction(state) == Meet(Generation(2, (0, 1, 3)), hosts=True)
    gone_on = observe(state, Met())
    assert answer(observe(gone_on, Requested(2, FOUR, 1, (1,))), 2) == Generation(2, (0, 1, 3))
    # All are told which two; the one that is out, too.
    assert gone_on.parted == {(1, 2)}
    three = observe(after(3, Interrupted()), Called(0, Generation(2, (0, 1, 3)), gone_on.parted))
    assert observe(three, Met()).parted == {(1, 2)}
    out = instruction(observe(after(2, Interrupted()), Excluded(gone_on.generation, gone_on.parted)))
    assert isinstance(out, Stop)
    assert out.reason.startswith("devices 1 and 2 cannot reach each other")


def test_device_that_missed_one_regroup_joins_the_next() -> None:
    three = observe(after(3, Interrupted()), NotReached(frozenset({1})))
    three = observe(three, NotReached(frozenset({1, 2})))
    assert three.unreachable == {1}  # after both meetings
    assert observe(three, NotReached(frozenset())).unreachable == frozenset()
    five = Generation(0, (0, 1, 2, 3, 4))
    state = after(0, *(Requested(d, five, 0) for d in (1, 2, 3, 4)), Missed(), generation=five)
    for device in (1, 3, 4):
        state = observe(state, Requested(device, five, 1, (2,)))
    state = observe(state, Requested(2, five, 1, ()))
    assert instruction(state) == Meet(Generation(2, (0, 1, 3, 4)), hosts=True)
    assert state.parted == {(1, 2), (3, 2), (4, 2)}


def test_device_follows_a_leader_it_had_declared_lost() -> None:
    zero, one = after(0, Interrupted()), after(1, Lost(0, dead=False))
    two = after(2, Interrupted())
    assert instruction(one) == Gather((2, 3))
    assert instruction(two) == Ask(0)
    one = observe(one, Reached(0, zero.generation))  # device 0 asks whom it waits for whether they are there
    assert instruction(one) == Ask(0)


@pytest.mark.parametrize("seed", range(150))
def test_any_message_order_ends_in_one_generation(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randint(2, 6)
    everyone = Generation(0, tuple(range(count)))
    world = World(
        dice, {d: Member(d, everyone) for d in everyone.members}, set(everyone.members), set(everyone.members)
    )
    if count > 2 and dice.random() < 0.4:
        world.apart.add(frozenset(dice.sample(range(count), 2)))
    for _ in range(dice.randint(0, count - 1)):
        world.hiccups = dice.choice((0.0, 0.0, 0.1))
        for _ in range(dice.randint(0, 60)):
            world.turn()
        if dice.random() < 0.5:
            world.grow()
            for _ in range(dice.randint(0, 60)):
                world.turn()
        victim = dice.choice(sorted((world.alive & world.awake) - {*world.comes}))
        if dice.random() < 0.6 and len(world.alive & world.awake) > 1:
            world.alive.discard(victim)
            world.waits.pop(victim, None)
        else:
            world.members[victim] = observe(world.members[victim], Interrupted())  # a step failed, nobody is lost
    silent, world.hiccups = set(), 0.0
    if len(world.alive) > 2 and dice.random() < 0.5:
        silent = {dice.choice(sorted(world.alive))}
        world.awake -= silent
    for turn in range(20_000):
        world.turn()
        if turn == 10_000:
            world.awake |= silent  # it wakes, and must not disturb
    left = {d: s for d, s in world.members.items() if d in world.alive and d not in world.comes}
    training = {d: s.generation for d, s in left.items() if s.phase == "training"}
    assert len(set(training.values())) <= 1
    generation = next(iter(training.values()), None)
    if generation is not None:
        assert set(generation.members) & world.alive == set(training)
        assert not set(generation.members) & set(world.comes)
    for state in left.values():  # nobody waits for ever
        assert state.phase in ("training", "out")


@pytest.mark.parametrize("seed", range(60))
def test_only_a_frozen_device_is_removed(seed: int) -> None:
    dice = random.Random(seed)
    everyone = Generation(0, tuple(range(dice.randint(3, 6))))
    world = World(
        dice,
        {d: Member(d, everyone) for d in everyone.members},
        {*everyone.members},
        {*everyone.members},
        patience=0.95,
    )
    slept: set[int] = set()
    for _ in range(3):
        training = [d for d, state in world.members.items() if state.phase == "training"]
        if len(training) < 3:  # of two, the higher one cannot know whether the other goes on
            break
        failed, sleeper = dice.choice(training), dice.choice(training)
        world.members[failed] = observe(world.members[failed], Interrupted())
        for _ in range(dice.randint(0, 50)):
            world.turn()
        world.awake.discard(sleeper)
        slept.add(sleeper)
        for _ in range(dice.randint(0, 150)):
            world.turn()
        world.awake.add(sleeper)
        for _ in range(5000):
            world.turn()
        generations = [s.generation for s in world.members.values() if s.phase == "training"]
        assert generations
        assert set(generations) == {generations[0]}
        assert len(generations) == len(generations[0].members)
        assert {d for d, state in world.members.items() if state.phase == "out"} <= slept
