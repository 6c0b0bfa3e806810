import asyncio

from echo2d.runtime.process.mailbox import EVENTS_MAX, EVENTS_PER_TURN_MAX, Mailbox


async def test_events_come_in_order_and_many_at_a_time() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(EVENTS_PER_TURN_MAX + 1):
        await mailbox.put(number)
    assert await mailbox.take(timeout_s=None) == list(range(EVENTS_PER_TURN_MAX))
    assert await mailbox.take(timeout_s=None) == [EVENTS_PER_TURN_MAX]
    assert await mailbox.take(timeout_s=0.0) == []


async def test_who_brings_too_much_waits_until_some_is_taken() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(EVENTS_MAX):
        await mailbox.put(number)
    async with asyncio.TaskGroup() as tasks:
        late = tasks.create_task(mailbox.put(-1))
        await asyncio.sleep(0)
        assert not late.done()
        await mailbox.take(timeout_s=None)


async def test_closing_lets_everybody_go_on() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(EVENTS_MAX):
        await mailbox.put(number)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(mailbox.put(-1))
        await asyncio.sleep(0)
        mailbox.close()
    for number in range(2 * EVENTS_MAX):
        await mailbox.put(number)


async def test_waking_brings_nothing_and_loses_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox()
    await mailbox.put(1)
    mailbox.wake()
    await mailbox.put(2)
    assert await mailbox.take(timeout_s=None) == [1, 2]
    mailbox.wake()
    assert await mailbox.take(timeout_s=None) == []
    assert mailbox.waiting() == []
    for number in range(EVENTS_MAX):
        await mailbox.put(number)
    mailbox.wake()  # it is full: `take` does not wait
    assert len(mailbox.waiting()) == EVENTS_PER_TURN_MAX
