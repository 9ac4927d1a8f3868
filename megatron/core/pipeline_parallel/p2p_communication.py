"""Point-to-point messages between pipeline stages: the only place that sends or receives one.

Nobody says what to send: the messages follow from the plans, see `channel_messages`.

Note [Pipeline messages cannot deadlock]
----------------------------------------
Each ordered pair of neighbouring stages has a communicator of its own, a *channel*: it carries data one way only.

NCCL ignores tags, and runs what is issued on one communicator one after the other on one stream (with a
communicator bound to its device, everything on it; otherwise everything between two ranks). With one
communicator for both directions, a receive that was posted early would hold up a send behind it that the
peer needs first, and two peers that both send first would wait for each other. Batching sends with receives
avoids this only where both peers issue the same batches, which is a property of particular schedules. On a
channel nothing is in the way:

1. The sender sends in the order of its plan. The receiver posts its receives in the order of the *sender's*
   plan, which it knows too, so both ends agree without tags, whatever the schedule.
2. A sender never waits for the receiver. It keeps the data until it knows that they have arrived.
3. A receiver waits only for data that its next action needs.

So the only waiting is for inputs of actions, and it ends for every plan that `check_plan` accepts. The price
is up to four small communicators on a rank. On a GPU this takes for granted that messages on several
communicators can be under way at once. tests/pipeline/test_executor.py runs every schedule, and random ones.

Note [When sent data are freed]
-------------------------------
Asking a request whether it is complete works on NCCL, but gloo answers only to a wait. So completion is
deduced: when a message arrives that stage d sent at position k of its plan, everything that d needed for
positions up to k has arrived there, and a wait for it returns at once. That is when the memory of a stage's
output is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm_group import CommGroup
from megatron.core.pipeline_parallel.schedule_plan import Action, Plan, consumer, producer
from megatron.core.rank_grid import stage_channels

# How many actions ahead receives are posted: one, so that a message travels while the action before it computes.
_RECEIVE_AHEAD = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """The output of an action that another action needs.

    Attributes:
        action: the action that needs it.
        sent_at: position, in the sender's plan, of the action that computes it.
        needed_at: position of `action` in the receiver's plan.
        post_at: position by which the receiver must have posted it, because it or a message behind it on the
            channel is needed there.
    """

    action: Action
    sent_at: int
    needed_at: int
    post_at: int


def channel_messages(plans: Plan, source: int, destination: int, num_chunks: int) -> list[Message]:
    """All messages from stage `source` to stage `destination`, in the order in which they are sent."""
    position = {action: at for at, action in enumerate(plans[destination])}
    needs = [
        (target[1], sent_at, position[target[1]])
        for sent_at, action in enumerate(plans[source])
        if (target := consumer(source, action, len(plans), num_chunks)) is not None and target[0] == destination
    ]
    messages: list[Message] = []
    post_at = len(plans[destination])
    for action, sent_at, needed_at in reversed(needs):
        post_at = min(post_at, needed_at)
        messages.append(Message(action=action, sent_at=sent_at, needed_at=needed_at, post_at=post_at))
    return messages[::-1]


class PipelineCommunicator:
    """The channels of one stage to its neighbours. Made by all stages of a pipeline at the same time.

    Args:
        channels: of this stage, see `ParallelState`; those that nothing will be sent on stay unused.
    """

    def __init__(
        self,
        group: CommGroup,
        channels: Mapping[tuple[int, int], CommGroup],
        *,
        num_chunks: int,
        hidden_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group = group
        self.num_chunks = num_chunks
        self.hidden_shape = hidden_shape
        self.dtype = dtype
        self.device = device
        self.channels = {
            pair: channels[pair] for pair in stage_channels(group.size, circular=num_chunks > 1) if group.rank in pair
        }
        self._connect()
        self._plans: Plan = ()
        self._messages: dict[tuple[int, int], list[Message]] = {}

    def _connect(self) -> None:
        """Use each channel once.

        NCCL connects at the first use, which holds up each end until the other one comes. Later, when one posts a
        receive before it computes what the other end waits for, that would be a deadlock.
        """
        for (source, destination), channel in self.channels.items():
            token = torch.zeros(1, device=self.device)
            if self.group.rank == source:
                dist.send(token, self.group.ranks[destination], group=channel.process_group)
            else:
                dist.recv(token, self.group.ranks[source], group=channel.process_group)

    def exchange(self, plans: Plan) -> Exchange:
        """The messages of one run of `plans`. Worked out once for steps that run the same plans."""
        if plans is not self._plans:
            self._plans = plans
            self._messages = {pair: channel_messages(plans, *pair, self.num_chunks) for pair in self.channels}
        return Exchange(self, len(plans), self._messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Posted:
    """A receive that has been posted."""

    message: Message
    buffer: Tensor
    work: dist.Work


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A send that may be under way, with the data that must not be freed or changed meanwhile."""

    message: Message
    data: Tensor
    work: dist.Work


class Exchange:
    """The messages of this stage during one run of its plan; positions are those in the plan."""

    def __init__(
        self,
        communicator: PipelineCommunicator,
        num_stages: int,
        messages: Mapping[tuple[int, int], Sequence[Message]],
    ) -> None:
        self._communicator = communicator
        self._num_stages = num_stages
        self._stage = communicator.group.rank
        # Keyed by the neighbour.
        self._to_post = {source: deque(arriving) for (source, to), arriving in messages.items() if to == self._stage}
        self._to_send = {
            to: {message.action: message for message in leaving}
            for (source, to), leaving in messages.items()
            if source == self._stage
        }
        self._sent: dict[int, deque[_Sent]] = {to: deque() for to in self._to_send}
        # Keyed by the action that takes it.
        self._posted: dict[Action, _Posted] = {}
        self._kept: dict[Action, Tensor] = {}

    def post_receives(self, position: int) -> None:
        """Posts the receives for the action at `position` and the next one; call before computing it."""
        communicator = self._communicator
        for source, messages in self._to_post.items():
            while messages and messages[0].post_at <= position + _RECEIVE_AHEAD:
                message = messages.popleft()
                buffer = torch.empty(communicator.hidden_shape, dtype=communicator.dtype, device=communicator.device)
                channel = communicator.channels[source, self._stage]
                work = dist.irecv(buffer, communicator.group.ranks[source], group=channel.process_group)
                assert work is not None
                self._posted[message.action] = _Posted(message=message, buffer=buffer, work=work)

    def receive(self, action: Action) -> Tensor:
        """The input of `action`: hidden states for a forward, their gradient for a backward. Waits for it."""
        if action in self._kept:
            return self._kept.pop(action)
        posted = self._posted.pop(action)
        posted.work.wait()
        source = producer(self._stage, action, self._num_stages, self._communicator.num_chunks)
        assert source is not None
        self._settle(source[0], posted.message.sent_at)
        return posted.buffer

    def send(self, action: Action, data: Tensor) -> None:
        """Sends the output of `action` to whoever needs it. `data` must not change afterwards."""
        target = consumer(self._stage, action, self._num_stages, self._communicator.num_chunks)
        assert target is not None, f"nobody needs the output of {action}"
        destination, needing = target
        if destination == self._stage:
            self._kept[needing] = data
            return
        data = data.contiguous()
        channel = self._communicator.channels[self._stage, destination]
        work = dist.isend(data, self._communicator.group.ranks[destination], group=channel.process_group)
        assert work is not None
        message = self._to_send[destination][needing]
        self._sent[destination].append(_Sent(message=message, data=data, work=work))

    def finish(self) -> None:
        """Waits until everything sent has arrived; call after the last action."""
        unread = [*self._kept, *self._posted, *(m.action for ms in self._to_post.values() for m in ms)]
        assert not unread, f"the plan left messages unread: {unread}"
        for destination in self._sent:
            self._settle(destination, None)

    def _settle(self, destination: int, position: int | None) -> None:
        """Lets go of what has arrived when the destination's plan is at `position` (None: its end), and of
        what is known to be complete. What was sent before something that has arrived has arrived as well."""
        sent = self._sent.get(destination, deque())
        while sent and (position is None or sent[0].message.post_at <= position or sent[0].work.is_completed()):
            sent.popleft().work.wait()
