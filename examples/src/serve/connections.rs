//! Connections: how many there may be, and how long one may keep the server waiting.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::gauge::Gauge;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutStream;

use super::metrics::TurnedAway;
use super::peer::Stream;

/// A client that does not send the head of a request within this time is gone, also between two
/// requests.
pub(super) const HEAD: Duration = Duration::from_secs(30);

/// A client that takes nothing of an answer for this time is gone.
pub(super) const STALL: Duration = Duration::from_secs(30);

/// Bytes of an answer that the system holds for a client that does not read. Left alone it takes
/// megabytes for each.
const SEND_BUFFER: u32 = 128 << 10;

/// Bytes that the server holds beside these.
const WRITE_BUFFER: usize = 64 << 10;

/// Connections beyond those that there may be, at the same time: they get one answer, which is that there
/// are too many for all but those who watch the server. Others are closed without a word.
pub(super) const SPARE: usize = 64;

/// How long such a connection stays.
const SPARE_TIME: Duration = Duration::from_secs(2);

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
    /// What serves the connections that there may be, and those beyond.
    router: Router,
    spare_router: Router,
    all: GracefulShutdown,
    places: Arc<Semaphore>,
    spare_places: Arc<Semaphore>,
    open: Gauge,
    turned_away: TurnedAway,
}

impl Connections {
    /// At most `most` at a time, which `router` serves and `open` counts; `spare` serves some beyond
    /// these, for one request each. All that are beyond are counted as `turned_away`.
    pub(super) fn new(
        router: Router,
        most: usize,
        spare: Router,
        open: Gauge,
        turned_away: TurnedAway,
    ) -> Self {
        Self {
            router,
            spare_router: spare,
            all: GracefulShutdown::new(),
            places: Arc::new(Semaphore::new(most)),
            spare_places: Arc::new(Semaphore::new(SPARE)),
            open,
            turned_away,
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
            if let Ok(place) = self.places.clone().try_acquire_owned() {
                self.serve(stream, place);
                continue;
            }
            let spare = self.spare_places.clone().try_acquire_owned();
            self.turned_away.count(spare.is_ok());
            if let Ok(place) = spare {
                self.serve_spare(stream, place);
            }
        }
    }

    /// Lets those that are open end with their answer, and waits for it.
    pub(super) async fn close(self) {
        self.all.shutdown().await;
    }

    fn serve(&self, stream: TcpStream, place: OwnedSemaphorePermit) {
        let (connection, open) = (
            self.connection(stream, &self.router, true),
            Counted::new(&self.open),
        );
        tokio::spawn(async move {
            let _held = (place, open);
            connection.await;
        });
    }

    fn serve_spare(&self, stream: TcpStream, place: OwnedSemaphorePermit) {
        let connection = self.connection(stream, &self.spare_router, false);
        tokio::spawn(async move {
            let _held = place;
            let _ = tokio::time::timeout(SPARE_TIME, connection).await;
        });
    }

    /// Serves a connection to its end, for one request or as many as come.
    fn connection(
        &self,
        stream: TcpStream,
        router: &Router,
        keep_alive: bool,
    ) -> impl Future<Output = ()> + use<> {
        // Tokens are small, and wanted one by one. Without it they come late, but come.
        let _ = stream.set_nodelay(true);
        let stream = Stream::new(stream);
        let peer = stream.peer();
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(STALL));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .keep_alive(keep_alive)
            // Who sends no more may wait for an answer: who waits for one finds out who does not.
            .half_close(true)
            .header_read_timeout(HEAD)
            .max_buf_size(WRITE_BUFFER);
        let router = TowerToHyperService::new(router.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let peer = peer.with(request.version());
            request.extensions_mut().insert(peer);
            router.call(request)
        });
        let connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
        let watched = self.all.watcher().watch(connection);
        async move {
            // Whatever it ended with, nobody is left to tell.
            let _ = watched.await;
        }
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
