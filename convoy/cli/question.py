"""PlanQuestion: a net and the options to plan it with, as the command line gives them."""

from dataclasses import dataclass

from convoy.config.checks import check_counts
from convoy.layout.comm_dtype import parse_comm_dtype
from convoy.model.nets import graph_of
from convoy.plan.plan import parse_outputs
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.request import PlanRequest


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What `convoy plan`, `predict` and `simulate` are asked about.

    Attributes:
        batch: global batch of a step, in samples.
        optimizer: whose state counts as memory.
        wire, outputs: of every plan, by name; wire also as "bf16".
        micro_batches: per step.
    """

    net: str
    image: tuple[int, int, int]
    classes: int
    batch: int
    optimizer: str = "sgd-momentum"
    wire: str = "exact"
    outputs: str = "everywhere"
    micro_batches: int = 1

    def check(self) -> None:
        """Refuse what can be refused before anything is read.

        Raises:
            InputError: sizes that cannot be, an unknown wire format or place of outputs.
        """
        check_counts(self.batch, self.classes)
        parse_comm_dtype(self.wire)
        parse_outputs(self.outputs)

    def request(self, fleet: FleetKnowledge) -> PlanRequest:
        """Build the net, and return the planning request for one micro-batch.

        Raises:
            InputError: an unknown net; a fleet with neither times nor classes or peaks.
            MismatchError: times of another model.
            PlanError: a batch that cannot be divided equally.
        """
        self.check()
        graph = graph_of(self.net, self.image, self.classes)
        wire, outputs = parse_comm_dtype(self.wire), parse_outputs(self.outputs)
        whole = PlanRequest(graph, self.batch, fleet, optimizer=self.optimizer, wire=wire, outputs=outputs)
        return whole.split(self.micro_batches)
