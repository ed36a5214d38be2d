//! How many chat templates run at a time, and how long someone waits for one.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use super::error::{ApiError, Result};
use super::work;

/// Renderings at a time. A template has a limit of steps, but a step may take long, and nothing ends it: so
/// many threads it can hold, and no more.
pub(super) const AT_ONCE: usize = 2;

/// How long a client waits for one at most.
pub(super) const LONGEST: Duration = Duration::from_secs(10);

/// The places for renderings.
#[derive(Debug, Clone)]
pub(super) struct Renders(Arc<Semaphore>);

impl Renders {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE)))
    }

    /// Runs `job` in one of the places. It keeps its place also where nobody waits for it any more.
    ///
    /// # Errors
    /// Those of `job`, or it takes longer than someone waits: `limit` if that is shorter.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        limit: Option<Duration>,
        job: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let places = self.0.clone();
        let rendered = async move {
            // Nobody closes it.
            let place = places.acquire_owned().await;
            work(move || {
                let _place = place;
                job()
            })
            .await
        };
        let limit = limit.map_or(LONGEST, |limit| limit.min(LONGEST));
        let in_time = tokio::time::timeout(limit, rendered).await;
        in_time.unwrap_or_else(|_| Err(too_slow(limit)))
    }
}

fn too_slow(limit: Duration) -> ApiError {
    let message = format!(
        "messages: expected the chat template to take at most {} s, waiting for others of its kind included, got \
         more: mend the template, or shorten the messages",
        limit.as_secs()
    );
    ApiError {
        param: Some("messages".to_owned()),
        ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    /// A rendering that does not end must hold nobody longer than said, take no place but its own, and one
    /// that comes to its end must give its place back.
    #[tokio::test]
    async fn who_waits_is_told_in_time() {
        let renders = Renders::new();
        let limit = Some(Duration::from_millis(50));
        let mut ends = Vec::new();
        for _ in 0..AT_ONCE {
            let (end, wait) = mpsc::channel::<()>();
            ends.push(end);
            let endless = move || Ok(wait.recv().is_err());
            let error = renders.run(limit, endless).await.unwrap_err();
            assert_eq!(error.status, StatusCode::GATEWAY_TIMEOUT);
        }
        let begun = Instant::now();
        assert!(
            renders.run(limit, || Ok(())).await.is_err(),
            "no place is left"
        );
        assert!(begun.elapsed() < LONGEST);
        assert!(work(|| Ok(true)).await.unwrap(), "other work goes on");
        drop(ends);
        assert!(renders.run(None, || Ok(true)).await.unwrap());
    }
}
