//! Connections: how many there may be, and how long one may keep the server waiting.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutStream;

use super::error::ApiError;

/// A client that does not send the head of a request within this time is gone, also between two
/// requests.
const HEAD: Duration = Duration::from_secs(30);

/// A client that takes nothing of an answer for this time is gone.
const STALL: Duration = Duration::from_secs(30);

/// Bytes of an answer that the system holds for a client that does not read. Left alone it takes
/// megabytes for each.
const SEND_BUFFER: u32 = 128 << 10;

/// Bytes that the server holds beside these.
const WRITE_BUFFER: usize = 64 << 10;

/// Connections that are told at the same time that there are too many; others are closed without a word.
const TOLD: usize = 64;

/// How long such a connection stays, so that the client reads the answer before it finds it closed.
const TELL: Duration = Duration::from_secs(1);

/// Connections that the system holds until they are accepted.
const BACKLOG: u32 = 1024;

/// An address of its own, of which nobody can connect to yet.
///
/// # Errors
/// What the system says.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    // A server that starts again takes the address of the one before, as listeners of tokio do. On
    // Windows the same option takes the address of one that runs.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    // Accepted connections have the listener's.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Begins to take connections.
///
/// # Errors
/// What the system says.
pub(super) fn listen(socket: TcpSocket) -> io::Result<TcpListener> {
    socket.listen(BACKLOG)
}

/// The connections that there are.
pub(super) struct Connections {
    router: Router,
    all: GracefulShutdown,
    most: usize,
    places: Arc<Semaphore>,
    told: Arc<Semaphore>,
    open: Gauge,
}

impl Connections {
    /// At most `most` at a time, which `router` serves and `open` counts.
    pub(super) fn new(router: Router, most: usize, open: Gauge) -> Self {
        Self {
            router,
            all: GracefulShutdown::new(),
            most,
            places: Arc::new(Semaphore::new(most)),
            told: Arc::new(Semaphore::new(TOLD)),
            open,
        }
    }

    /// Takes connections without end.
    pub(super) async fn accept(&self, listener: &TcpListener) -> Infallible {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) if of_connection(&error) => continue,
                // Too many open files, most likely: others may close some.
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            match self.places.clone().try_acquire_owned() {
                Ok(place) => self.serve(stream, place),
                Err(_) => self.turn_away(stream),
            }
        }
    }

    /// Lets those that are open end with their answer, and waits for it.
    pub(super) async fn close(self) {
        self.all.shutdown().await;
    }

    fn serve(&self, stream: TcpStream, place: OwnedSemaphorePermit) {
        // Tokens are small, and wanted one by one. Without it they come late, but come.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(STALL));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .max_buf_size(WRITE_BUFFER);
        let service = TowerToHyperService::new(self.router.clone());
        let connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
        let (watcher, open) = (self.all.watcher(), Counted::new(&self.open));
        tokio::spawn(async move {
            let _held = (place, open);
            // Whatever it ended with, nobody is left to tell.
            let _ = watcher.watch(connection).await;
        });
    }

    /// Says that there are too many.
    fn turn_away(&self, mut stream: TcpStream) {
        let Ok(told) = self.told.clone().try_acquire_owned() else {
            return;
        };
        let (status, code) = (StatusCode::SERVICE_UNAVAILABLE, "too_many_connections");
        let text = format!(
            "expected at most {} connections at a time: close some, or come again later",
            self.most
        );
        let body = ApiError::new(status, code, text).body().to_string();
        let response = format!(
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
             connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        tokio::spawn(async move {
            let _told = told;
            let tell = async {
                stream.write_all(response.as_bytes()).await?;
                stream.shutdown().await?;
                // Closed with a request unread, the connection would be reset and the answer lost.
                while stream.read(&mut [0; 1024]).await? > 0 {}
                io::Result::Ok(())
            };
            let _ = tokio::time::timeout(TELL, tell).await;
        });
    }
}

/// Whether a connection failed before it was accepted, which says nothing of the next one.
fn of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    [ConnectionAborted, ConnectionRefused, ConnectionReset].contains(&error.kind())
}

/// Counts a connection for as long as it lives.
struct Counted(Gauge);

impl Counted {
    fn new(open: &Gauge) -> Self {
        open.inc();
        Self(open.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
