"""Random histories of a router: front ends and replicas that do what they like, and links that lose the order.

What the router commands is held against what it was told: this is a second account of the same facts, which shares
no code with the router's.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

from manylora_lab.baselines import ALL_ROUTERS

from manylora.protocol.commands import SetTimer, Status
from manylora.protocol.events import Timer
from manylora.protocol.routing import (
    Asked,
    AskReport,
    Assign,
    Cancelled,
    Drain,
    Ended,
    Fence,
    Held,
    Lacks,
    Listed,
    MoveAsked,
    Place,
    Progress,
    Refuse,
    ReplicaDown,
    ReplicaFacts,
    ReplicaReport,
    ReplicaUp,
    RouterCommand,
    RouterEvent,
    Solve,
    Solved,
    StepPlane,
    Unlisted,
    Withdraw,
    Withdrawn,
)
from manylora.router.policies.policy import find_router
from manylora.router.router import Router
from tests.router.invariants import check
from tests.router.rig import config_of

PLANES = (StepPlane(0.01, 1e-3, 1e-6, 1e-4, 1e-5),)
SMALL = ReplicaFacts(24, 16, 320, 3, PLANES, 1e-3, 1e-3, 1e-2, adapter_pages=8)
LARGE = ReplicaFacts(60, 16, 800, 6, PLANES, 5e-4, 1e-3, 1e-2)
ADAPTERS = {1: (8, 2), 2: (16, 4), 3: (64, 10)}
"""Rank and pages. A small replica cannot hold the third."""
RESTLESS, IMPATIENT = "tests.router.restless:Restless", "tests.router.restless:Impatient"


@dataclasses.dataclass
class Machine:
    """A replica as it is, whatever the router thinks of it."""

    epoch: int
    facts: ReplicaFacts
    is_alive: bool = True
    seq: int = 0
    seen: int = 0
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    """The attempt of each request."""
    adapters: dict[int, int] = dataclasses.field(default_factory=dict)
    told: dict[int, int] = dataclasses.field(default_factory=dict)
    lacks: set[int] = dataclasses.field(default_factory=set)


def up(replica: int, machine: Machine) -> ReplicaUp:
    return ReplicaUp(replica, machine.epoch, machine.facts, tuple(sorted(machine.lacks)))


@dataclasses.dataclass
class Client:
    """A request as its front end knows it."""

    asked: Asked
    attempt: int = 0
    replica: int | None = None
    machine: Machine | None = None
    tokens: int = 0
    is_withdrawing: bool = False
    is_released: bool = False
    assigned: list[int] = dataclasses.field(default_factory=list)


class World:
    """One history, drawn from a seed. ``play`` and then ``settle``."""

    def __init__(self, seed: int, policy: str | None = None) -> None:
        self.random = random.Random(seed)
        self.policy = policy or self.random.choice([*ALL_ROUTERS, RESTLESS, IMPATIENT])
        settings: dict[str, Any] = {}
        if self.policy == "caraserve":
            settings = self.random.choice([{}, {"kernel": "mbgmv"}])
        if self.policy.startswith("dlora"):
            settings = {"replan_s": 2.0, "reserve": 0.3}
            if self.policy == "dlora":
                settings |= {"solve_interval_s": 1.0, "least_delay_s": 0.0}
        if self.policy in ("punica", "punica-consolidate", "first-fit"):
            settings["max_batch"] = self.random.choice([2, 32])
        self.drops = find_router(self.policy).handover == "drop"
        self.config = config_of(
            self.policy,
            settings,
            queue_timeout_s=6.0,
            drain_timeout_s=3.0,
            move_cooldown_s=self.random.choice([0.1, 10.0]),
            prefix_blocks=self.random.choice([4, 1000]),
            trace=self.random.random() < 0.3,
        )
        self.router = Router(self.config)
        self.now = 0.0
        self.timer: float | None = None
        self.machines: dict[int, Machine] = {}
        self.epochs: collections.Counter[int] = collections.Counter()
        self.believed: dict[
            int, Machine
        ] = {}  # what the router was told is up, and has not been told is down
        self.draining: set[int] = set()
        self.numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        self.clients: dict[str, Client] = {}
        self.ended: set[str] = set()
        self.listed: set[int] = set()
        self.links: list[RouterEvent] = []  # news on its way, in any order
        self.num_asked = 0
        self.history: list[tuple[float, RouterEvent, list[RouterCommand]]] = []

    # ------------------------------------------------------------ the router

    def tell(self, event: RouterEvent) -> None:
        self.now += self.random.choice([0.0, 1e-3, 0.02])
        if isinstance(event, ReplicaDown):
            believed = self.believed.get(event.replica)
            if believed is not None and believed.epoch == event.epoch:
                self.forget(event.replica)
        if isinstance(event, Withdrawn) and event.request in self.clients:
            client = self.clients[event.request]
            client.is_released |= client.is_withdrawing and event.attempt == client.attempt
        commands = self.router.handle(event, self.now)
        self.history.append((self.now, event, commands))
        check(self.router)
        for command in commands:
            self.obey(command)

    def forget(self, replica: int) -> None:
        """The router believes that it is down."""
        del self.believed[replica]
        self.draining.discard(replica)

    def obey(self, command: RouterCommand) -> None:
        match command:
            case SetTimer():
                assert command.at > self.now
                self.timer = command.at
            case Assign():
                self.assigned(command)
            case Withdraw():
                client = self.clients[command.request]
                assert (client.attempt, client.replica) == (command.attempt, command.replica)
                assert not client.is_withdrawing, "told once an attempt"
                client.is_withdrawing = True
                machine = self.machines.get(command.replica)
                if machine is not None and machine.is_alive:
                    machine.held.pop(command.request, None)
                    self.links.append(Withdrawn(command.request, command.attempt, (client.tokens,)))
            case Refuse():
                assert command.request not in self.ended, "a request ends once"
                self.end(command.request)
            case Fence():
                believed = self.believed.get(command.replica)
                if believed is not None and believed.epoch == command.epoch:
                    self.forget(command.replica)
                machine = self.machines.get(command.replica)
                if machine is not None and machine.epoch == command.epoch:
                    machine.is_alive = False
            case AskReport():
                assert command.replica in self.believed
                self.report(command.replica, is_full=True, is_late=True)
            case Place():
                machine = self.believed[command.replica]
                assert command.adapter not in machine.lacks, "it cannot have the adapter"
            case Solve():
                self.solve(command)

    def assigned(self, command: Assign) -> None:
        assert command.request not in self.ended, "nothing follows the end"
        client = self.clients[command.request]
        assert command.attempt > client.attempt, "attempts only rise"
        machine = self.believed.get(command.replica)
        assert machine is not None, "nothing goes to what is down"
        assert command.replica not in self.draining, "nothing goes to what drains"
        if client.replica is not None and self.believed.get(client.replica) is client.machine:
            assert client.is_withdrawing, "one owner"
            assert self.drops or client.is_released, "the last one has let go"
        self.check_fit(machine.facts, client.asked)
        assert client.asked.adapter not in machine.lacks, "nothing goes where its adapter is not"
        key = command.replica, machine.epoch
        self.numbers[key] += 1
        assert command.number == self.numbers[key]
        client.attempt, client.replica, client.machine = command.attempt, command.replica, machine
        client.is_withdrawing = client.is_released = False
        client.assigned.append(command.replica)
        if machine.is_alive:
            machine.held[command.request] = command.attempt

    def check_fit(self, facts: ReplicaFacts, asked: Asked) -> None:
        """What Replica refuses must not be sent to it."""
        _, adapter_pages = ADAPTERS.get(asked.adapter, (0, 0))
        total = asked.prompt_tokens + asked.max_tokens
        most = facts.num_pages if facts.adapter_pages is None else facts.adapter_pages
        assert total <= facts.max_model_len
        assert adapter_pages <= most
        assert -(-(total - 1) // facts.page_tokens) + adapter_pages <= facts.num_pages

    def end(self, name: str) -> None:
        client = self.clients.pop(name)
        self.ended.add(name)
        machine = None if client.replica is None else self.machines.get(client.replica)
        if machine is not None:
            machine.held.pop(name, None)

    def solve(self, problem: Solve) -> None:
        """An answer that may be late, of another world, or none."""
        places = range(len(problem.replicas))
        kind = self.random.choice(["shares", "shares", "none", "wrong", "nothing"])
        if kind == "none":
            return
        shares = tuple(
            tuple(float(place == chosen) for place in places)
            for chosen in (self.random.choice(places) for _ in problem.requests)
        )
        if kind == "wrong":
            shares = shares[1:]
        self.links.append(Solved(problem.number, () if kind == "nothing" else shares))

    # ------------------------------------------------------------ what happens

    def play(self, num_events: int) -> None:
        """Any order of anything."""
        acts = [
            *[self.ask] * 4, *[self.deliver] * 6, *[self.report_any] * 3, *[self.generate] * 2, *[self.tick] * 4,
            *[self.start] * 3, self.finish, self.cancel, self.kill, self.hang, self.drain, self.change_list,
            self.ask_again, self.babble, self.lack,
        ]  # fmt: skip
        self.change_list()
        self.start()
        for _ in range(num_events):
            self.random.choice(acts)()

    def ask(self) -> None:
        self.num_asked += 1
        name = f"r{self.num_asked}"
        blocks = self.random.randrange(4)
        chat = self.random.randrange(3)
        asked = Asked(
            name,
            self.random.choice([0, 0, 1, 2, 3]),
            self.random.choice([1, 40, 150, 300, 700]),
            self.random.choice([1, 20, 200]),
            tuple(1000 * chat + block for block in range(blocks)),
            waited_s=self.random.choice([0.0, 0.0, 5.0]),
        )
        self.clients[name] = Client(asked)
        self.tell(asked)

    def ask_again(self) -> None:
        """A link has ended, or a front end repeats itself."""
        if not self.clients:
            return
        name = self.random.choice(sorted(self.clients))
        client = self.clients[name]
        attempts = client.attempt + self.random.choice([-1, 0, 0])
        if attempts >= client.attempt and client.replica is not None:
            machine = self.machines.get(client.replica)
            if machine is not None:
                machine.held.pop(name, None)
            client.replica = None
        self.tell(dataclasses.replace(client.asked, attempts=max(attempts, 0), generated=(client.tokens,)))

    def deliver(self) -> None:
        """Any of the news on its way, perhaps twice."""
        if self.links:
            place = self.random.randrange(len(self.links))
            news = self.links[place] if self.random.random() < 0.1 else self.links.pop(place)
            self.tell(news)

    def alive(self) -> list[int]:
        return sorted(replica for replica, machine in self.machines.items() if machine.is_alive)

    def report_any(self) -> None:
        if alive := self.alive():
            self.report(self.random.choice(alive), is_full=self.random.random() < 0.1)

    def report(self, replica: int, is_full: bool = False, is_late: bool = False) -> None:
        """A true report, or an arbitrary one: the router must hold in any case."""
        machine = self.machines[replica]
        machine.seq += 1
        number = self.numbers[replica, machine.epoch]
        machine.seen = self.random.randint(machine.seen, number)
        tiers = {adapter: self.random.randrange(3) for adapter in ADAPTERS if self.random.random() < 0.3}
        machine.told |= tiers
        residency = machine.told if is_full else tiers
        free = self.random.randrange(machine.facts.num_pages)
        news = Status(
            machine.seq, self.random.randrange(4), self.random.randrange(4),
            free, self.random.randrange(machine.facts.num_pages - free), self.random.randrange(300),
            self.random.randrange(900), is_full or machine.seq == 1, tuple(residency.items()),
            tuple(1000 * self.random.randrange(3) + block for block in range(self.random.randrange(3))),
            self.random.choice([0.0, 0.01]), self.random.random() < 0.2,
            self.random.choice([0.0, 5e-4, 2e-3]), page_read_s=self.random.choice([0.0, 0.03]),
        )  # fmt: skip
        report = ReplicaReport(replica, machine.epoch, machine.seen, news)
        if is_late or self.random.random() < 0.5:
            self.links.append(report)
        else:
            self.tell(report)

    def generate(self) -> None:
        held = sorted(name for name, client in self.clients.items() if client.replica is not None)
        if held:
            name = self.random.choice(held)
            client = self.clients[name]
            client.tokens += 1
            self.links.append(Progress(name, 0, client.tokens))

    def finish(self) -> None:
        held = sorted(name for name, client in self.clients.items() if client.replica is not None)
        if held:
            name = self.random.choice(held)
            self.end(name)
            self.tell(Ended(name, self.random.randrange(200)))

    def cancel(self) -> None:
        if self.clients and self.random.random() < 0.5:
            name = self.random.choice(sorted(self.clients))
            self.end(name)
            self.tell(Cancelled(name))

    def tick(self) -> None:
        if self.timer is not None:
            self.now = max(self.now, self.timer + self.random.choice([0.0, 0.1, 2.0]))
            self.timer = None
            self.tell(Timer())

    def start(self, facts: ReplicaFacts | None = None) -> None:
        """A replica comes up; where one was it is another epoch, and the router may not know of the last one's
        end."""
        replica = self.random.randrange(4)
        if replica in self.alive():
            return
        self.epochs[replica] += 1
        drawn = facts or self.random.choice([SMALL, LARGE, LARGE])
        machine = Machine(self.epochs[replica], dataclasses.replace(drawn, numerics="ab"[replica % 2]))
        self.machines[replica] = machine
        if replica in self.believed:
            self.forget(replica)
        self.believed[replica] = machine
        machine.lacks = self.some_adapters()
        self.tell(up(replica, machine))

    def some_adapters(self) -> set[int]:
        return {adapter for adapter in ADAPTERS if self.random.random() < 0.15}

    def lack(self) -> None:
        """A replica has adapters that it had not, or the other way round; it drops what it has of these."""
        if not self.believed:
            return
        replica = self.random.choice(sorted(self.believed))
        machine = self.believed[replica]
        machine.lacks = self.some_adapters()
        for name, client in self.clients.items():
            if client.machine is machine and client.asked.adapter in machine.lacks:
                machine.held.pop(name, None)
                client.replica = None
        self.tell(Lacks(replica, machine.epoch, tuple(sorted(machine.lacks))))

    def kill(self) -> None:
        if alive := self.alive():
            replica = self.random.choice(alive)
            machine = self.machines[replica]
            machine.is_alive = False
            blamed = tuple(name for name in sorted(machine.held) if self.random.random() < 0.7)
            known = blamed if self.random.random() < 0.7 else None
            news = ReplicaDown(replica, machine.epoch, "killed", self.random.random() < 0.7, known)
            if self.random.random() < 0.3:
                self.links.append(news)
            else:
                self.tell(news)

    def hang(self) -> None:
        """It serves no more, and nothing says so."""
        if (alive := self.alive()) and self.random.random() < 0.5:
            self.machines[self.random.choice(alive)].is_alive = False

    def drain(self) -> None:
        if self.believed and self.random.random() < 0.5:
            replica = self.random.choice(sorted(self.believed))
            self.draining.add(replica)
            self.tell(Drain(replica, self.random.random() < 0.5))

    def change_list(self) -> None:
        adapter = self.random.choice(sorted(ADAPTERS))
        if adapter in self.listed and self.random.random() < 0.3:
            self.listed.remove(adapter)
            self.tell(Unlisted(adapter))
        else:
            for each in ADAPTERS:
                self.listed.add(each)
                self.tell(Listed(each, *ADAPTERS[each]))

    def babble(self) -> None:
        """What nobody should say, or has said before."""
        said: list[Any] = [
            Ended("nothing"), Cancelled("nothing"), Progress("nothing", 0, 1),
            Withdrawn("nothing", 1), ReplicaDown(9, 1), Drain(9), Unlisted(99), Solved(99),
            MoveAsked("nothing", 0), ReplicaReport(9, 1, 0, Status(1, 0, 0, 1)), Unlisted(0), Lacks(9, 1, (1,)),
        ]  # fmt: skip
        known = [(replica, machine) for replica, machine in sorted(self.machines.items())]
        if known:
            replica, machine = self.random.choice(known)
            said.append(up(replica, machine))
            said.append(Lacks(replica, machine.epoch - 1, (1, 2)))
            said.append(ReplicaReport(replica, machine.epoch - 1, 0, Status(1, 0, 0, 1)))
        if self.clients:
            name = self.random.choice(sorted(self.clients))
            said += [
                Withdrawn(name, 0),
                Progress(name, 5, 3),
                MoveAsked(name, self.random.randrange(5)),
            ]
        self.tell(self.random.choice(said))

    def succeed(self) -> None:
        """The router is gone, and another is told by replicas and front ends what is so."""
        self.router = Router(self.config)
        self.history.clear()
        self.links.clear()
        self.numbers.clear()
        self.draining.clear()
        self.timer = None
        self.machines = {replica: self.machines[replica] for replica in self.alive()}
        self.believed = dict(self.machines)
        for adapter in sorted(self.listed):
            self.tell(Listed(adapter, *ADAPTERS[adapter]))
        for replica, machine in self.believed.copy().items():
            machine.seen = 0
            self.tell(up(replica, machine))
        names = sorted(self.clients)
        self.random.shuffle(names)
        for name in names:
            client = self.clients[name]
            asked = dataclasses.replace(client.asked, attempts=client.attempt, generated=(client.tokens,))
            client.is_withdrawing = False
            if client.machine is None or name not in client.machine.held or client.replica is None:
                client.replica = None
                self.tell(asked)
            else:
                self.tell(Held(asked, client.replica, client.machine.epoch))

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """All is well again: every request that lives comes to its end."""
        while self.links:
            self.tell(self.links.pop(0))
        for replica in range(4):
            self.epochs[replica] += 1
            facts = dataclasses.replace(LARGE, numerics="ab"[replica % 2])
            machine = self.machines[replica] = Machine(self.epochs[replica], facts)
            if replica in self.believed:
                self.forget(replica)
            self.believed[replica] = machine
            self.tell(up(replica, machine))
        for _ in range(200):
            if not self.clients:
                break
            for replica, machine in sorted(self.machines.items()):
                machine.seq += 1
                machine.seen = self.numbers[replica, machine.epoch]
                status = Status(machine.seq, 0, 0, 60, is_full=True)
                self.tell(ReplicaReport(replica, machine.epoch, machine.seen, status))
            while self.links:
                self.tell(self.links.pop(0))
            for name in sorted(self.clients):
                client = self.clients[name]
                if (
                    client.replica is not None
                    and self.machines[client.replica].held.get(name) == client.attempt
                ):
                    self.end(name)
                    self.tell(Ended(name, 10))
            self.tick()
        assert not self.clients, f"these never end: {sorted(self.clients)}"
