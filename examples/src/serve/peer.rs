//! The other end of a connection: what hyper reads and writes, and whether somebody is still there.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::Version;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::error::{ApiError, Result};

/// What asks a client that sends no more whether it reads: an interim answer. Others would do by the
/// standard, but this one every client passes over.
const ASK: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// How often that is asked.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// How often it is asked whether a client has ended its side behind bytes that nobody has read yet.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The stream of a connection, for hyper.
pub(super) struct Stream {
    peer: Peer,
    write: OwnedWriteHalf,
}

/// Who is at the other end of it, for the answers.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    read: Arc<OwnedReadHalf>,
    /// Whether the system has all that was written: only then something can be put between.
    flushed: Arc<AtomicBool>,
    /// Whether it knows interim answers.
    interim: bool,
}

impl Stream {
    pub(super) fn new(stream: TcpStream) -> Self {
        let (read, write) = stream.into_split();
        let peer = Peer {
            read: Arc::new(read),
            flushed: Arc::new(AtomicBool::new(true)),
            interim: false,
        };
        Self { peer, write }
    }

    /// Who is there.
    pub(super) fn peer(&self) -> Peer {
        self.peer.clone()
    }
}

impl Peer {
    /// The same, with a request of a version of HTTP.
    pub(super) fn with(&self, version: Version) -> Self {
        Self {
            interim: version >= Version::HTTP_11,
            ..self.clone()
        }
    }

    fn stream(&self) -> &TcpStream {
        (*self.read).as_ref()
    }

    /// Waits until the client sends no more, behind a request that is read to its end. It may be gone, or
    /// wait for the answer: both end their requests alike. What differs is what comes of bytes that reach
    /// them; see [`Peer::refused`].
    pub(super) async fn silent(&self) {
        // Behind another request, or what is none, the end is not read; the system tells of it all the same.
        while let Ok(1..) = self.stream().peek(&mut [0]).await {
            match self.stream().ready(Interest::READABLE).await {
                Ok(ready) if !ready.is_read_closed() => tokio::time::sleep(LOOK_AGAIN).await,
                _ => return,
            }
        }
    }

    /// Waits until the system of the client has said that nobody is there for what was sent.
    pub(super) async fn refused(&self) {
        // An error is that there is one.
        let _ = self.stream().ready(Interest::ERROR).await;
    }

    /// Does what an answer takes for as long as somebody is there to read it: then it is dropped. As of
    /// [`Peer::gone`], nothing may be sent meanwhile.
    ///
    /// # Errors
    /// Those of `work`, or nobody is there.
    pub(super) async fn waits_for<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            () = self.gone() => Err(ApiError::client_gone()),
        }
    }

    /// Waits until nobody is there to read the answer. To be polled while nothing of it is sent, by the task
    /// of the connection.
    async fn gone(&self) {
        self.silent().await;
        if !self.interim {
            return std::future::pending().await;
        }
        loop {
            if self.flushed.load(Ordering::Relaxed) {
                match self.stream().try_write(ASK) {
                    Ok(written) if written == ASK.len() => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // Also if half of it was written, behind which nothing makes sense.
                    Ok(_) | Err(_) => return,
                }
            }
            if tokio::time::timeout(ASK_AGAIN, self.refused())
                .await
                .is_ok()
            {
                return;
            }
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.peer.stream();
        loop {
            ready!(stream.poll_read_ready(cx))?;
            match stream.try_read(buf.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    buf.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.peer.flushed.store(false, Ordering::Relaxed);
        Pin::new(&mut self.write).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.peer.flushed.store(false, Ordering::Relaxed);
        Pin::new(&mut self.write).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.write.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.write).poll_flush(cx))?;
        self.peer.flushed.store(true, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_shutdown(cx)
    }
}
