//! An answer to its client: whole, or as a stream of server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use serde_json::Value;

use super::error::{ApiError, Result, json_response};
use super::form::Form;
use super::peer::Peer;
use super::reply::{Piece, Reply};

/// A stream that has nothing to say says so this often: a connection that is gone is noticed, and one
/// that waits in a queue is not taken for gone.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What a stream that came to its end ends with.
const DONE: &str = "[DONE]";

/// The answer, streamed or in one piece.
///
/// # Errors
/// A text of an answer in one piece could not be brought to its end, or `peer` is gone before it was.
pub(super) async fn answer(reply: Reply, form: Form, stream: bool, peer: Peer) -> Result<Response> {
    if stream {
        return Ok(streamed(reply, form, peer));
    }
    peer.waits_for(whole(reply, &form)).await
}

/// The answer in one piece.
///
/// # Errors
/// A text could not be brought to its end.
async fn whole(mut reply: Reply, form: &Form) -> Result<Response> {
    let mut texts: Vec<Piece> = (0..reply.len())
        .map(|index| Piece {
            index,
            ..Piece::default()
        })
        .collect();
    while let Some(piece) = reply.next().await {
        let piece = piece?;
        let text = &mut texts[piece.index];
        text.text.push_str(&piece.text);
        text.tokens.extend(piece.tokens);
        text.finish = piece.finish;
    }
    Ok(json_response(
        StatusCode::OK,
        &form.whole(&texts, reply.usage),
    ))
}

/// The answer as it comes. A failure on the way is the last event, and then there is no `[DONE]`: who
/// takes that for the end must not take half a text for a whole one.
fn streamed(reply: Reply, form: Form, peer: Peer) -> Response {
    let openings: Vec<Event> = (0..reply.len())
        .filter_map(|index| form.opening(index))
        .map(|opening| event(&opening))
        .collect();
    let events = stream::iter(openings).chain(pieces(reply, form, peer));
    let events = events.map(Ok::<_, Infallible>);
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(events).keep_alive(keep_alive).into_response()
}

/// A stream that goes on.
struct Open {
    reply: Reply,
    form: Form,
    peer: Peer,
    /// Whether the client sends no more, and has been sent something since.
    asked: bool,
}

/// Where a stream stands.
enum State {
    Open(Box<Open>),
    /// The usage has been told.
    Told,
    Over,
}

fn pieces(reply: Reply, form: Form, peer: Peer) -> impl Stream<Item = Event> + Send {
    let open = Open {
        reply,
        form,
        peer,
        asked: false,
    };
    stream::unfold(State::Open(Box::new(open)), |state| async {
        match state {
            State::Open(open) => open.next().await,
            State::Told => Some((Event::default().data(DONE), State::Over)),
            State::Over => None,
        }
    })
}

impl Open {
    /// The next event, and where the stream stands then; none if nobody is there to read it.
    async fn next(mut self: Box<Self>) -> Option<(Event, State)> {
        let piece = tokio::select! {
            piece = self.reply.next() => piece,
            () = self.peer.silent(), if !self.asked => {
                self.asked = true;
                return Some((Event::default().comment(""), State::Open(self)));
            }
            () = self.peer.refused(), if self.asked => return None,
        };
        Some(match piece {
            Some(Ok(piece)) => (event(&self.form.chunk(&piece)), State::Open(self)),
            Some(Err(error)) => (failure(&error), State::Over),
            None => match self.form.closing(self.reply.usage) {
                Some(closing) => (event(&closing), State::Told),
                None => (Event::default().data(DONE), State::Over),
            },
        })
    }
}

fn event(part: &Value) -> Event {
    Event::default().data(part.to_string())
}

fn failure(error: &ApiError) -> Event {
    event(&error.body())
}
