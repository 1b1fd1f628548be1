"""Messages of the ring between GPUs of one host, by their copy engines: the tiles keep every multiprocessor.

A message takes two flags, which streams write and wait for without a kernel (infcl/peer_memory):

    receiver's current stream    grant: what it receives into is free        where the message is posted
    sender's copy stream         wait for the grant, copy, flag the arrival
    receiver's current stream    wait for the arrival                        where the message is waited for

Flags are numbers of messages. All ranks post the same messages in the same order, so a message has the same number on
all of them, and what one rank flags to another only grows. Nothing waits for itself: of the messages under way, that of
the lowest number needs streams only that have come past all before it.

What is received lies in memory that the ranks share, at the same place on each. It is taken where a message first finds
no room, up to LIMIT, and kept. Messages that would need more are the process group's own sends and receives. That is no
great loss: where blocks are large a tile's work, which grows with the square of the rows, hides what messages cost.
"""

import collections
import functools
import logging

import torch
import torch.distributed as dist
from torch import Tensor

from infcl import gpu_watch, peer_memory
from infcl.loss.links import uses_nccl
from infcl.peer_memory import ALIGNED

# Bytes of GPU memory, kept between passes: enough for 32,768 rows a rank at D = 768 (two blocks in 16 bits, two
# gradients in 32), which is a batch of 262,144 on eight GPUs.
LIMIT = 320 * 2**20
_kept: list["PeerCopies"] = []
_log = logging.getLogger(__name__)


def copies_of(group: dist.ProcessGroup, device: torch.device) -> "PeerCopies | None":
    """The group's one set of buffers; None where its GPUs do not reach each other. Collective the first time.

    None while a CUDA graph is captured, too (peer_memory.may_wait).
    """
    return _copies_of(group, device) if peer_memory.may_wait(device) else None


@functools.cache
def _copies_of(group: dist.ProcessGroup, device: torch.device) -> "PeerCopies | None":
    with torch.cuda.device(device):  # where objects are gathered
        if not uses_nccl(group):
            return None
        copies, problem = peer_memory.on_peers(group, device, lambda: PeerCopies(group, device))
        if copies is None:
            _log.info("the ring's messages are the process group's sends: %s", problem)
        else:
            _kept.append(copies)
        return copies


def kept_bytes() -> int:
    """GPU memory that this process keeps for messages, all groups together; torch's allocator does not count it."""
    return sum(one.kept_bytes for one in _kept)


class PeerCopies:
    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.device, self.limit = device, LIMIT
        self._stream, self._driver = peer_memory.on_all(
            group, lambda: (torch.cuda.Stream(device), peer_memory.Driver())
        )
        self._current = torch.cuda.current_stream(device)
        self._last = collections.deque[tuple[int, str, int, int]](maxlen=1024)  # messages: number, what, to, from
        self._watch = gpu_watch.Watch(group, device, self._missing)
        self._posted, self._rooms = 0, []  # type: int, list[_Room]
        self._under_way: dict[int, Message] = {}
        self._flags = self._new_room(2 * self.size * ALIGNED)  # what cannot be shared is known from the start
        peer_memory.on_all(group, self._try_flags)  # nor what the driver refuses

    @property
    def kept_bytes(self) -> int:
        return sum(len(room.memory) for room in (self._flags, *self._rooms))

    def begin(self) -> None:
        """A pass of the ring begins: it may use all that is kept.

        What the last one left under way is waited for: an exception may have ended it on all ranks, at the same place.
        """
        for room in self._rooms:
            room.taken = 0
        current = torch.cuda.current_stream(self.device)
        if current != self._current:  # the last pass had another stream, which may still use the buffers
            current.wait_stream(self._current)
            self._current = current
        for message in list(self._under_way.values()):
            message.wait()

    def buffers(self, like: Tensor) -> list[Tensor] | None:
        """Two tensors like this one to receive into until the next pass; None where there is no room for them."""
        size = -(-like.nbytes // ALIGNED) * ALIGNED
        fitting = [room for room in self._rooms if room.left >= 2 * size]
        if not fitting:
            if self.kept_bytes + 2 * size > self.limit:
                return None
            try:
                fitting = [self._new_room(2 * size)]
            except peer_memory.RankFailed as error:  # a GPU is full, which all ranks know here
                self.limit = self.kept_bytes
                _log.info("%d MiB for the ring's messages could not be shared: %s", 2 * size // 2**20, error)
                return None
            self._rooms += fitting
        room = min(fitting, key=lambda room: room.left)
        begin, room.taken = room.taken, room.taken + 2 * size
        places = (room.memory[start : start + like.nbytes] for start in (begin, begin + size))
        return [place.view(like.dtype).view(like.shape) for place in places]

    def post(self, tensor: Tensor, received: Tensor, to: int, source: int, what: str) -> "Message":
        """Send a contiguous tensor to rank `to` of the group, and receive its like from rank `source` into `received`.

        received: of `buffers`; every rank receives this message into the same one. Nothing on this rank's current
        stream still reads or writes there. what: names the message where it does not come.
        """
        assert tensor.is_contiguous(), "only memory without gaps is copied"
        self._posted += 1
        self._last.append((self._posted, what, to, source))
        flags, raw = self._flags.addresses, self._stream.cuda_stream
        with torch.cuda.device(self.device):  # whose default stream is meant
            current, ready, sent = torch.cuda.current_stream(self.device), torch.cuda.Event(), torch.cuda.Event()
            self._driver.write_flag(current.cuda_stream, flags[source] + self._grant(self.rank), self._posted)
            ready.record(current)
            self._stream.wait_event(ready)
            self._driver.wait_flag(raw, flags[self.rank] + self._grant(to), self._posted)
            self._driver.copy(raw, self._at(received, to), tensor.data_ptr(), tensor.nbytes)
            self._driver.write_flag(raw, flags[to] + self._arrival(self.rank), self._posted)
            sent.record(self._stream)
        self._watch.mark(sent.query)
        message = self._under_way[self._posted] = Message(self, source, self._posted, sent)
        return message

    def end(self) -> None:
        """A pass has ended: should it never come so far on the GPU, the process ends by the group's time-out."""
        with torch.cuda.device(self.device):
            self._watch.mark_here(torch.cuda.current_stream(self.device))

    def _try_flags(self) -> None:
        flags = self._flags.addresses
        grants = [address + self._grant(self.rank) for address in flags]
        peer_memory.try_flags(self._driver, self._current.cuda_stream, grants, flags[self.rank])

    def _missing(self) -> str:
        """What this rank waits for, by the flags."""
        with torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1)):  # never the one that waits
            flags = self._flags.memory.cpu().view(torch.int32)[:: ALIGNED // 4].tolist()
        own = dist.get_rank()
        for number, what, to, source in list(self._last):
            sender, receiver = (dist.get_global_rank(self.group, peer) for peer in (source, to))
            for flag, missing in (
                (flags[source], f"has not come from rank {sender} to rank {own}"),
                (flags[self.size + to], f"has not been asked for by rank {receiver}, to which rank {own} sends it"),
            ):
                if (flag - number) % 2**32 >= 2**31:
                    return f"{what} {missing}: that rank ended, hangs, or waits for one that does."
        return f"rank {own} waits, though all messages of its ring have come."

    def _new_room(self, num_bytes: int) -> "_Room":
        with torch.cuda.device(self.device):
            return _Room(*peer_memory.allocate(num_bytes, slice(None), self.group, self.device))

    def _at(self, received: Tensor, rank: int) -> int:
        """The address on a rank of what lies at the same place there."""
        for room in self._rooms:
            place = received.data_ptr() - room.memory.data_ptr()
            if 0 <= place < len(room.memory):
                return room.addresses[rank] + place
        raise ValueError("the tensor to receive into is not of PeerCopies.buffers")

    def _arrival(self, source: int) -> int:
        """Where a rank is told by another which message has arrived."""
        return source * ALIGNED

    def _grant(self, target: int) -> int:
        """Where a rank is told by another which message it may send it."""
        return (self.size + target) * ALIGNED


class _Room:
    """Memory that the ranks share, of which a pass has taken some bytes."""

    def __init__(self, memory: Tensor, addresses: list[int]):
        self.memory, self.addresses, self.taken = memory, addresses, 0

    @property
    def left(self) -> int:
        return len(self.memory) - self.taken


class Message:
    def __init__(self, copies: PeerCopies, source: int, number: int, sent: torch.cuda.Event):
        self._copies, self._source, self._number, self._sent = copies, source, number, sent

    def wait(self) -> None:
        """The current stream waits until the message has arrived, and this rank's own has left."""
        copies = self._copies
        flag = copies._flags.addresses[copies.rank] + copies._arrival(self._source)
        with torch.cuda.device(copies.device):
            current = torch.cuda.current_stream(copies.device)
            copies._driver.wait_flag(current.cuda_stream, flag, self._number)
            current.wait_event(self._sent)
        copies._under_way.pop(self._number, None)
