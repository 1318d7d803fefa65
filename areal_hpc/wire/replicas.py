"""Messages to a cell's control proxy, which guards its SGLang servers.

All requests go over TLS and show the control proxy's bearer key. A call about one replica also says
who calls, in headers:

| header             | meaning                                                                     |
|--------------------|-----------------------------------------------------------------------------|
| x-areal-incarnation| the replica's incarnation the caller means; 409 when it has been restarted  |
| x-areal-generation | the trainer's generation; 409 when a newer one has been here                |
| x-areal-deadline-s | a sender not heard of for this long has vanished                            |

| route                             | reply         | meaning                                     |
|-----------------------------------|---------------|---------------------------------------------|
| GET  /replicas                    | ReplicasOfCell | all; with keys to callers on this node     |
| POST /follow                      | FollowerPollReply | FollowerPollRequest, from other nodes   |
| POST /replicas/<i>/fence          | ReplicaView   | FenceReplicaRequest: out of service         |
| POST /replicas/<i>/serve          | ReplicaView   | ReopenReplicaRequest: weights verified, open|
| POST /replicas/<i>/load           | as SGLang     | LoadWeightsRequest: all, from a folder      |
| POST /replicas/<i>/score          | as SGLang     | ScorePromptRequest: also while it is paused |
| POST /replicas/<i>/<sglang route> | as SGLang     | forwarded if it is one of FORWARDED_ROUTES  |

When a sender has vanished, a replica whose weights it had not begun to change goes on with them;
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
"""`ready`: up, but its weights are unknown; `serving`: weights verified, agents may be routed."""


class UpdatePauseStats(Struct, frozen=True):
    """Cost of one update to the requests in flight at a replica, by its cell's clock."""

    version: str
    """`generation.step` that they went on with."""
    pause_s: float
    """From the order to pause until the replica served again."""
    busy_s: float
    """In which calls of the update were under way at this replica: for the rest of the pause it
    waited for the sender and for other replicas, as all take each step of an update together."""


ADAPTER_VARIABLE = "AREAL_HPC_SGLANG_ADAPTER"
"""In a server's environment: settings of an adapter, in PEFT's terms, as JSON. Without it updates
bring weights."""


class ServerKeys(Struct, frozen=True):
    """Keys of one incarnation of a server; empty where it asks for none."""

    api: str = ""
    """Opens the routes that generate and those that tell about the server."""
    admin: str = ""
    """Opens the routes that control it, `abort_request` among them."""

    def __repr__(self) -> str:
        return "ServerKeys(...)" if self.admin or self.api else "ServerKeys()"


NO_KEYS = ServerKeys()


def generate_server_keys() -> ServerKeys:
    return ServerKeys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))


class ReplicaView(Struct, frozen=True):
    """One SGLang server as its cell sees it."""

    index: int
    incarnation: int
    """Grows with every restart; an update group made for an older one is void."""
    state: ReplicaState
    url: str
    """Loopback address, for the proxy of the same node."""
    version: str = ""
    """`generation.step` while serving."""
    tp: int = 1
    """Tensor-parallel ranks: members it brings into an update group."""
    pause: UpdatePauseStats | None = None
    """That of its last update."""
    keys: ServerKeys = NO_KEYS
    """For those whom the control proxy tells: the proxy of the same node."""


class ReplicasOfCell(Struct, frozen=True):
    cell: str
    replicas: list[ReplicaView]


class FollowerPollRequest(Struct, frozen=True):
    """A further node of a cell whose replica spans nodes asks what to run, several times a second.

    Not heard of for `inference.multi_node.NODE_TIMEOUT_S`, it is lost, and so is the incarnation.
    """

    node: int
    """1, 2, ...: its place among the cell's nodes."""
    incarnation: int
    """Incarnation whose part runs there; 0: none."""


class FollowerPollReply(Struct, frozen=True):
    """Part that a further node is to run."""

    incarnation: int
    """0: nothing."""
    meeting_point: str
    """`host:port` where the server's parts meet."""


class FenceReplicaRequest(Struct, frozen=True):
    """Agents may not be routed to the replica until it is told to serve."""

    stays: bool = False
    """The sender gave the replica up: not even its vanishing opens the replica again."""


class ReopenReplicaRequest(Struct, frozen=True):
    """The replica holds the verified weights of `version`."""

    version: str


class LoadWeightsRequest(Struct, frozen=True):
    """The replica shall load the weights that lie in a folder of the run's `weights/`."""

    folder: str
    """Its name, which is no path."""
    version: str
    """`generation.step`, stamped on tokens from then on."""


class ScorePromptRequest(Struct, frozen=True):
    """The replica shall tell the log-probability of each token of a prompt, but for the first.

    It scores as many of them as fit in its context.
    """

    input_ids: list[int]
