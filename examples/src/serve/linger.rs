//! Bodies that are answered before they are read. A client that still sends would find the connection
//! reset and no answer, so that what it sends is read and forgotten for a while.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header;
use futures_util::StreamExt;
use hyper::body::{Body as _, Frame, SizeHint};

/// How long.
pub(super) const WHILE: Duration = Duration::from_secs(10);

/// A body of which what is left is read and forgotten, once nobody wants it any more.
struct Lingering {
    /// None once it came to its end.
    body: Option<Body>,
    /// Bytes to forget at most.
    most: usize,
    /// Whether the client waits for being told to send it. Nobody is, of what is to be forgotten.
    held_back: bool,
}

/// The request with such a body, of which at most so many bytes are forgotten.
pub(super) fn lingering(request: Request, most: usize) -> Request {
    let held_back = request.headers().contains_key(header::EXPECT);
    request.map(|body| {
        Body::new(Lingering {
            body: Some(body),
            most,
            held_back,
        })
    })
}

impl hyper::body::Body for Lingering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.held_back = false;
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let frame = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(None | Some(Err(_))) = &frame {
            self.body = None;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let ended = || SizeHint::with_exact(0);
        self.body.as_ref().map_or_else(ended, Body::size_hint)
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        if self.held_back || self.is_end_stream() {
            return;
        }
        let runtime = tokio::runtime::Handle::try_current();
        if let (Some(body), Ok(runtime)) = (self.body.take(), runtime) {
            let forgotten = forget(body, self.most);
            runtime.spawn(tokio::time::timeout(WHILE, forgotten));
        }
    }
}

async fn forget(body: Body, most: usize) {
    let (mut frames, mut length) = (body.into_data_stream(), 0);
    while let Some(Ok(frame)) = frames.next().await {
        length += frame.len();
        if length > most {
            break;
        }
    }
}
