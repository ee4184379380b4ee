"""A TCP connection that can fall silent without being closed, as when a network fails."""

import socket
import threading


class TcpProxy:
    """Forwards connections to a local port; while `flows` is not set, bytes wait and nobody is told."""

    def __init__(self, target_port):
        self.flows = threading.Event()
        self.flows.set()
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target_port))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source, target):
        try:
            while data := source.recv(1 << 16):
                self.flows.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # the other end is gone
            source.close()
            target.close()
