"""Servers of tests leave no connection behind, whatever their clients and handlers do."""

from __future__ import annotations

import asyncio

from tests.listening import listening


async def test_what_a_client_does_not_read_keeps_no_connection_open() -> None:
    held: list[asyncio.StreamWriter] = []

    async def much(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(1 << 24))
        held.append(writer)

    async with listening(much) as port:
        _, user = await asyncio.open_connection("127.0.0.1", port)
        while not held or not held[0].is_closing():  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(0.001)
        assert held[0].transport.get_write_buffer_size() > 0, "its peer reads nothing"
    assert held[0].transport.get_write_buffer_size() == 0
    user.close()
    await user.wait_closed()
