"""The common settings of clients of servers without TLS."""

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`verify` of their httpx clients, each of which would else read all authorities that it might trust."""
