"""Messages to a cell's control proxy, which guards its SGLang servers.

All requests go over TLS with the control proxy's bearer key. A call about one replica also
identifies its caller, in headers:

| header             | meaning                                                                     |
|--------------------|-----------------------------------------------------------------------------|
| x-areal-incarnation| the replica's incarnation the caller means; 409 when it has been restarted  |
| x-areal-generation | the trainer's generation; 409 after a call of a newer one                   |
| x-areal-deadline-s | a sender that is silent for this long counts as vanished                    |

| route                             | reply         | meaning                                     |
|-----------------------------------|---------------|---------------------------------------------|
| GET  /replicas                    | ReplicasOfCell | all; with keys to callers on this node     |
| POST /follow                      | FollowerPollReply | FollowerPollRequest, from other nodes   |
| POST /replicas/<i>/fence          | ReplicaView   | FenceReplicaRequest: out of service         |
| POST /replicas/<i>/serve          | ReplicaView   | ReopenReplicaRequest: weights verified, open|
| POST /replicas/<i>/load           | as SGLang     | LoadWeightsRequest: all, from a folder      |
| POST /replicas/<i>/score          | as SGLang     | ScorePromptRequest: also during a pause     |
| POST /replicas/<i>/<sglang route> | as SGLang     | forwarded if it is one of FORWARDED_ROUTES  |

When a sender vanishes, a replica whose weights it had not begun to change continues with them;
any other is restarted, and waits for a full resend.
"""

import secrets
from typing import Literal

from msgspec import Struct

FORWARDED_ROUTES = frozenset(
    {
        "pause_generation",
        "continue_generation",
        "begin_weight_update",
        "end_weight_update",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "update_weights_from_distributed",
        "flush_cache",
        "model_info",
    }
)
"""Routes that neither unpickle nor execute names (see docs/decisions)."""

INCARNATION_HEADER = "x-areal-incarnation"
TRAINER_GENERATION_HEADER = "x-areal-generation"
SENDER_TIMEOUT_HEADER = "x-areal-deadline-s"

ReplicaState = Literal["starting", "ready", "serving", "failed"]
"""`ready`: up, with unknown weights; `serving`: weights verified, it receives agents' requests."""


class UpdatePauseStats(Struct, frozen=True):
    """Cost of one update to the requests in flight at a replica, by its cell's clock."""

    version: str
    """`generation.step` that they continued with."""
    pause_s: float
    """Time from the order to pause until the replica served again."""
    busy_s: float
    """Time for which calls of the update were under way at this replica. For the rest of the pause
    it waited for the sender and other replicas: all take each step of an update together."""


ADAPTER_VARIABLE = "AREAL_HPC_SGLANG_ADAPTER"
"""Variable of a server's environment: settings of an adapter, in PEFT's terms, as JSON. Without it
updates carry whole weights."""


class ServerKeys(Struct, frozen=True):
    """Keys of one incarnation of a server; empty if it requires none."""

    api: str = ""
    """Key of the routes that generate and those that describe the server."""
    admin: str = ""
    """Key of the routes that control it, `abort_request` among them."""

    def __repr__(self) -> str:
        return "ServerKeys(...)" if self.admin or self.api else "ServerKeys()"


NO_KEYS = ServerKeys()


def generate_server_keys() -> ServerKeys:
    return ServerKeys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))


class ReplicaView(Struct, frozen=True):
    """State of one SGLang server of a cell."""

    index: int
    incarnation: int
    """Number that grows with every restart; an update group of an older one is void."""
    state: ReplicaState
    url: str
    """Loopback address, for the proxy of the same node."""
    version: str = ""
    """`generation.step` while serving."""
    tp: int = 1
    """Tensor-parallel ranks: its members in an update group."""
    pause: UpdatePauseStats | None = None
    """Pause of its last update."""
    keys: ServerKeys = NO_KEYS
    """Keys of the server; the control proxy sends them to the proxy of the same node alone."""


class ReplicasOfCell(Struct, frozen=True):
    cell: str
    replicas: list[ReplicaView]


class FollowerPollRequest(Struct, frozen=True):
    """Poll of a worker node of a cell whose replica spans nodes, several times a second.

    A node without a poll for `inference.multi_node.NODE_TIMEOUT_S` is lost with the incarnation.
    """

    node: int
    """Index of the node in the cell: 1, 2, ..."""
    incarnation: int
    """Incarnation whose part runs there; 0: none."""


class FollowerPollReply(Struct, frozen=True):
    """Part of the server that a worker node shall run."""

    incarnation: int
    """Incarnation of the part; 0: run none."""
    meeting_point: str
    """`host:port` at which the server's parts connect."""


class FenceReplicaRequest(Struct, frozen=True):
    """Request to route no agents to the replica until it is reopened."""

    stays: bool = False
    """Whether the sender gave the replica up: then it stays fenced if the sender vanishes."""


class ReopenReplicaRequest(Struct, frozen=True):
    """Notice that the replica holds the verified weights of `version`."""

    version: str


class LoadWeightsRequest(Struct, frozen=True):
    """Request to load the weights in a folder of the run's `weights/`."""

    folder: str
    """Name of the folder, not a path."""
    version: str
    """`generation.step`, stamped on tokens sampled after the load."""


class ScorePromptRequest(Struct, frozen=True):
    """Request for the log-probability of each token of a prompt but the first.

    The replica scores as many of them as fit in its context.
    """

    input_ids: list[int]
