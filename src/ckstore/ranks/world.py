"""``Ranks``: which rank of which job this process is, and how the ranks find each other.

Rank 0 listens on a port of its own, and passes its addresses and a random token to the others: through torch's process
group (once, as a tensor of bytes, never as a pickle), through the key-value store of torchrun, or by hand. After that,
neither torch nor a process group is used. Ranks try all addresses of rank 0, and take the one that knows the token.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckstore.errors import RankError, UnsupportedError, UsageError, shown_object
from ckstore.processes import close_in_children
from ckstore.ranks.io_loop import Job, Timing
from ckstore.ranks.link import Address, Link, listen
from ckstore.ranks.protocol import JOIN_SECONDS
from ckstore.state.markers import OnNewWorld, check_on_new_world

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_TOKEN_NBYTES = 32
_TOKEN_TEXT_MIN = 16
_INVITATION_NBYTES = 1024
_PORT_MAX = 65535
_LOOPBACK = "127.0.0.1"
_OUTSIDE = "192.0.2.1"
"""An address for documentation (RFC 5737). Nothing is sent to it: the kernel only chooses the interface."""


def _gone_error() -> UsageError:
    what = "this ckstore.Ranks was closed, or this process is a fork of the one that made it"
    return UsageError(what, todo="make another ckstore.Ranks on all ranks")


class Listener:
    """Rank 0's socket until a link takes it over. A forked child closes its copy."""

    def __init__(self, end: socket.socket) -> None:
        self._end: socket.socket | None = end
        # A store may be dropped without being closed.
        self._close = weakref.finalize(self, end.close)
        self.port = int(end.getsockname()[1])
        close_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor of the socket, which stays here."""
        if self._end is None:
            raise _gone_error()
        return self._end.fileno()

    def take(self) -> socket.socket:
        """Return the socket, which belongs to the caller from now on."""
        end, self._end = self._end, None
        if end is None:
            raise _gone_error()
        self._close.detach()
        return end

    def close(self) -> None:
        """Close the socket, unless a link has taken it over."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def close_in_child(self) -> None:
        """Close the copy of a forked child."""
        self.close()


@dataclass
class _Shared:
    """What one ``Ranks`` object opens once, for all handles that use it."""

    listener: Listener | None = None
    link: Link | None = None


@dataclass(frozen=True)
class Ranks:
    """The ranks that make one checkpoint together. Make it on every rank, in the same way.

    Attributes:
        rank: This rank, from 0.
        world: Number of ranks.
        address: Where rank 0 listens, as ``host:port``; several, separated by commas, if it is not clear which of them
            the others can reach. Savers use the same hosts, and a free port. Not needed with one rank.
        token: A secret of the job, the same on every rank and new for every start. Not needed with one rank.
        per_rank: What a restore in another world does with values that differ between ranks. ``"own"``: each rank
            takes its own, and a rank without one is an error. ``"nearest"``: a new rank takes that of rank modulo saved
            world. A function of rank, world and saved world returns for each rank the one whose value to take.
        on_divergence: What a commit does if replicas of a tensor differ that is not marked ``PerRank``. ``"warn"``:
            it stores a plain tensor for each rank, and shards of one replica. ``"raise"``: it fails on all ranks.
        join_seconds: How long ranks wait for one that does not connect or does not take part.
    """

    rank: int
    world: int
    address: str | None = None
    token: str = field(default="", repr=False)
    per_rank: OnNewWorld = "own"
    on_divergence: Literal["warn", "raise"] = "warn"
    join_seconds: float = JOIN_SECONDS
    _shared: _Shared = field(default_factory=_Shared, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rank", "world"):
            value = getattr(self, name)
            if type(value) is not int:
                raise UsageError(f"{name} is not an int: {shown_object(value)}")
        if not 0 <= self.rank < self.world:
            raise UsageError(f"there is no rank {self.rank} of {self.world}", todo="count ranks from 0")
        check_on_new_world(self.per_rank)
        if self.on_divergence not in ("warn", "raise"):
            raise UsageError(f"on_divergence is {shown_object(self.on_divergence)}", todo='use "warn" or "raise"')
        if not self.join_seconds > 0:
            raise UsageError(f"join_seconds is {shown_object(self.join_seconds)}", todo="use a number above 0")
        if self.world > 1:
            if self.address is None:
                todo = "pass address=, or use ckstore.Ranks.of_torch()"
                raise UsageError(f"the address of rank 0 of {self.world} is not given", todo=todo)
            if len(self.token) < _TOKEN_TEXT_MIN:
                todo = "use the same random text on all ranks, for example secrets.token_hex()"
                raise UsageError(f"a token has at least {_TOKEN_TEXT_MIN} characters", todo=todo)
            addresses_of(self.address)

    @classmethod
    def of_torch(cls, group: ProcessGroup | None = None, **options: Any) -> Ranks:
        """Return the ranks of a process group of torch.distributed. It is used once, here, by all of its ranks.

        Args:
            group: The group. None: the default group, which must be initialized.
            options: ``per_rank``, ``on_divergence`` and ``join_seconds``.

        Raises:
            UsageError: There is no process group.
            RankError: Rank 0 cannot listen.
        """
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            todo = "call torch.distributed.init_process_group first, or use ckstore.Ranks.of_env()"
            raise UsageError("torch.distributed is not initialized", todo=todo)
        rank, world = distributed.get_rank(group), distributed.get_world_size(group)
        if rank < 0:
            raise UsageError("this process is not in the group", todo="pass a group that this process is in")
        if world == 1:
            return cls(0, 1, **options)
        listener, invitation = (None, b"") if rank else invite()
        content = _broadcast(invitation, group)
        return cls._invited(rank, world, content, listener, options)

    @classmethod
    def of_env(cls, address: str | None = None, token: str | None = None, **options: Any) -> Ranks:
        """Return the ranks that RANK and WORLD_SIZE give, as torchrun sets them.

        Rank 0 and the others find each other through the store of torchrun, or by ``address`` and ``token``.

        Args:
            address: Where rank 0 listens, as ``host:port``.
            token: A secret of the job, the same on every rank.
            options: ``per_rank``, ``on_divergence`` and ``join_seconds``.

        Raises:
            UsageError: The variables are missing, or there is no store of torchrun and no address.
            RankError: The store of torchrun cannot be reached, or rank 0 cannot listen.
        """
        rank, world = _number_in("RANK"), _number_in("WORLD_SIZE")
        if world == 1:
            return cls(rank, 1, **options)
        if address is not None:
            return cls(rank, world, address, token or "", **options)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            todo = "pass address= and token=, or initialize torch.distributed and use ckstore.Ranks.of_torch()"
            raise UsageError("this process was not started by torchrun", todo=todo)
        listener, invitation = (None, b"") if rank else invite()
        content = _exchange(invitation, float(options.get("join_seconds", JOIN_SECONDS)))
        return cls._invited(rank, world, content, listener, options)

    def link(self) -> Link:
        """Return the connection to the other ranks, which is opened by the first call and shared by all.

        Raises:
            RankError: Rank 0 cannot be reached, or cannot listen.
        """
        shared = self._shared
        if shared.link is None:
            shared.link = self._open(shared)
        return shared.link

    def close(self) -> None:
        """Close the connection to the other ranks. They cannot commit any more."""
        if self._shared.listener is not None:
            self._shared.listener.close()
        if self._shared.link is not None:
            self._shared.link.close()

    def _open(self, shared: _Shared) -> Link:
        job = Job(self.rank, self.world, self.token.encode())
        timing = Timing(join_seconds=self.join_seconds)
        if self.world == 1:
            return Link(job, timing)
        assert self.address is not None
        addresses = addresses_of(self.address)
        if self.rank:
            return Link(job, timing, addresses=addresses)
        listener = shared.listener or Listener(_listen("", addresses[0][1]))
        return Link(job, timing, listener=listener.take())

    @classmethod
    def _invited(cls, rank: int, world: int, content: bytes, listener: Listener | None, options: Any) -> Ranks:
        token, address = invited(content)
        ranks = cls(rank, world, address, token, **options)
        ranks._shared.listener = listener
        return ranks


def invited(content: bytes) -> tuple[str, str]:
    """Return the token and the addresses of an invitation.

    Raises:
        RankError: Rank 0 could not listen.
    """
    token, _, rest = content.decode().partition(" ")
    if token == "failed":
        raise RankError(f"rank 0 cannot listen: {rest}", todo="pass address=", rank=0)
    return token, rest


def addresses_of(text: str) -> list[Address]:
    """Return the addresses in ``host:port,host:port``.

    Raises:
        UsageError: One of them is not an address.
    """
    found: list[Address] = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
            raise UsageError(f"not an address: {part!r}", todo="write host:port, for example node17:29600")
        found.append((host.strip("[]"), int(port)))
    return found


def invite(hosts: Sequence[str] = ()) -> tuple[Listener | None, bytes]:
    """Listen on a free port, and return what others must know: an error as well, so that none waits forever.

    Args:
        hosts: Where the others reach this machine; empty: find out.
    """
    if not hosts:
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE", "-") == os.environ.get("WORLD_SIZE")
        hosts = [_LOOPBACK] if is_one_host else _own_hosts()
    try:
        # On one machine, nobody else need be able to connect.
        listener = Listener(_listen(_LOOPBACK if set(hosts) == {_LOOPBACK} else "", 0))
    except RankError as error:
        return None, f"failed {error}".encode()[:_INVITATION_NBYTES]
    places = ",".join(f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}" for host in hosts)
    return listener, f"{secrets.token_hex(_TOKEN_NBYTES)} {places}".encode()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        where = f"{host or '*'}:{port}"
        raise RankError(f"rank 0 cannot listen ({error})", where=where, todo="choose another port", rank=0) from None


def _own_hosts() -> list[str]:
    """Return the names by which other machines may reach this one, the most likely first."""
    targets = [os.environ.get("MASTER_ADDR", ""), _OUTSIDE]
    found = [host for host in map(_host_toward, targets) if host and not host.startswith("127.")]
    # The loopback address is for several ranks on one machine without a network.
    return list(dict.fromkeys([*found, socket.gethostname(), _LOOPBACK]))


def _host_toward(target: str) -> str:
    """Return this machine's address on the way to another one. Empty: unknown."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as end:
            end.connect(address)
            return str(end.getsockname()[0])
    except OSError:
        return ""


def _number_in(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"the variable {name} is {text!r}", todo="start the job with torchrun, or use ckstore.Ranks()")
    return int(text)


def _broadcast(invitation: bytes, group: ProcessGroup | None) -> bytes:
    """Return rank 0's bytes on every rank of a process group."""
    import torch
    from torch import distributed

    content = invitation.ljust(_INVITATION_NBYTES, b"\0")
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_device_of(group))
    source = 0 if group is None else distributed.get_global_rank(group, 0)
    distributed.broadcast(tensor, src=source, group=group)
    return bytes(tensor.cpu().tolist()).rstrip(b"\0")


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Return a device whose tensors a group can send."""
    import torch
    from torch import distributed

    backends = str(distributed.get_backend_config(group))
    if any(name in backends for name in ("cpu:gloo", "cpu:mpi", "cpu:ucc")) or backends in ("gloo", "mpi", "ucc"):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise UnsupportedError(
            f"the process group ({backends}) can send neither CPU nor accelerator tensors",
            todo='initialize it with the backend "cpu:gloo,cuda:nccl", or pass address= to ckstore.Ranks',
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


_exchanges = 0
"""How many exchanges through torchrun's store this process has begun: every rank makes the same ones."""


def _exchange(invitation: bytes, seconds: float) -> bytes:
    """Return rank 0's bytes on every rank, through the store that the agent of torchrun serves."""
    global _exchanges
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _exchanges += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"ckstore/ranks/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}/{_exchanges}"
    try:
        host, port = os.environ["MASTER_ADDR"], _number_in("MASTER_PORT")
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        if invitation:
            store.set(key, invitation.decode())
        return bytes(store.get(key))
    except (RuntimeError, KeyError) as error:
        todo = "pass address= and token= to ckstore.Ranks.of_env"
        raise RankError(f"the store of torchrun cannot be used ({error})", todo=todo) from None
