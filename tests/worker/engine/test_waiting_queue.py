from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.asking import request
from worker.engine.fairness import Tenants
from worker.engine.request import Request
from worker.engine.sequence_blocks import SequenceBlocks
from worker.engine.waiting_queue import WaitingQueue


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_head_is_always_the_first_in_order(data: st.DataObject) -> None:
    """Against a list that is sorted anew each time."""
    queue, tenants = WaitingQueue(4), Tenants()
    waiting: list[Request] = []
    taken: list[Request] = []
    for arrival in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["push", "push", "take", "remove", "back", "charge"]))
        if action == "push":
            asked = request(f"r{arrival}", data.draw(st.integers(3, 6)), priority=data.draw(st.integers(-1, 1)))
            tenant = tenants.enter(asked.priority, data.draw(st.sampled_from("abc")), 1.0)
            record = Request(asked, tenant, SequenceBlocks(b"", False, 1), arrival, 0.0)
            queue.push(record)
            waiting.append(record)
        elif action == "take" and waiting:
            record = min(waiting, key=lambda r: r.order)
            assert queue.head() is record
            if data.draw(st.booleans()):
                record = queue.short(record.tenant) or record
            queue.remove(record)
            waiting.remove(record)
            taken.append(record)
        elif action == "remove" and waiting:
            record = data.draw(st.sampled_from(waiting))
            queue.remove(record)
            waiting.remove(record)
            tenants.leave(record.tenant)
        elif action == "back" and taken:
            record = data.draw(st.sampled_from(taken))
            taken.remove(record)
            queue.put_back(record)
            waiting.append(record)
        elif action == "charge" and waiting:
            data.draw(st.sampled_from(waiting)).tenant.charge_prompt(data.draw(st.integers(1, 9)))
        assert len(queue) == len(waiting)
        assert queue.head() is min(waiting, key=lambda r: r.order, default=None)
        for tenant in {r.tenant for r in [*waiting, *taken]}:
            short = (r for r in waiting if r.tenant is tenant and r.num_left <= 4)
            assert queue.short(tenant) is min(short, key=lambda r: r.arrival, default=None)


def test_a_tenant_that_comes_and_goes_leaves_nothing_behind() -> None:
    queue, tenants = WaitingQueue(4), Tenants()
    first = Request(request("first"), tenants.enter(0, "stays", 1.0), SequenceBlocks(b"", False, 1), 0, 0.0)
    queue.push(first)
    for number in range(500):
        tenant = tenants.enter(0, f"passing-{number}", 1.0)
        tenant.served += 10.0
        record = Request(request(f"r{number}"), tenant, SequenceBlocks(b"", False, 1), number, 0.0)
        queue.push(record)
        queue.remove(record)
        tenants.leave(tenant)
    assert queue.head() is first
    assert len(queue._classes[0]._heap) < 50
