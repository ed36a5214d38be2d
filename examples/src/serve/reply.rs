//! Updates of a request's texts to pieces of its answer, the same for every form of it.

use std::io::{self, Write};
use std::sync::Arc;

use axum::http::StatusCode;
use deepseek_model::engine::{EndReason, TokenLogprob, Update};
use deepseek_model::tokenizer::{TextStream, Tokenizer, TokenizerError};

use super::answers::Answers;
use super::error::{ApiError, Result};

/// What stands for no probability at all, which JSON has no number for, as OpenAI writes it.
const LEAST_LOGPROB: f32 = -9999.0;

/// A token that may stand somewhere.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    /// Its text, or its bytes where it is part of a character.
    pub(super) text: String,
    pub(super) bytes: Option<Vec<u8>>,
    /// In nats; none for the first of a text.
    pub(super) logprob: Option<f32>,
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    pub(super) chosen: Candidate,
    /// The likeliest in its place, as many as were asked for; none for the first of a text.
    pub(super) likeliest: Vec<Candidate>,
    /// Characters of the answer's text before it.
    pub(super) offset: usize,
}

/// A piece of a text's answer.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// The text's number.
    pub(super) index: usize,
    pub(super) text: String,
    /// If log-probabilities are asked for.
    pub(super) tokens: Vec<Token>,
    /// Why the text ended, in its last piece.
    pub(super) finish: Option<&'static str>,
}

/// What a request took.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    /// Tokens of its prompts, each counted once.
    pub(super) prompt: usize,
    /// Of these, those that were found in the cache.
    pub(super) cached: usize,
    /// Tokens of its outputs.
    pub(super) completion: usize,
}

/// A prompt that an answer begins with.
#[derive(Debug, Clone)]
pub(super) struct Echo {
    pub(super) text: String,
    /// Its tokens, without one that the server put before it.
    pub(super) ids: Vec<u32>,
}

/// The answer of a request as it comes.
pub(super) struct Reply {
    answers: Answers,
    tokenizer: Arc<Tokenizer>,
    /// Of each prompt, if it is part of the answer.
    echoes: Vec<Option<Echo>>,
    /// Whether tokens are told with their log-probabilities.
    logprobs: bool,
    /// Texts for each prompt.
    n: usize,
    texts: Vec<Text>,
    pub(super) usage: Usage,
}

/// Where a text stands.
#[derive(Debug, Clone, Default)]
struct Text {
    chars: usize,
    ended: bool,
}

impl Reply {
    /// The answer of a request with `n` texts for each of the prompts, which have `prompt_tokens` in all.
    pub(super) fn new(
        answers: Answers,
        tokenizer: Arc<Tokenizer>,
        echoes: Vec<Option<Echo>>,
        logprobs: bool,
        n: usize,
        prompt_tokens: usize,
    ) -> Self {
        Self {
            texts: vec![Text::default(); echoes.len() * n],
            answers,
            tokenizer,
            echoes,
            logprobs,
            n,
            usage: Usage {
                prompt: prompt_tokens,
                ..Usage::default()
            },
        }
    }

    /// Texts of the answer.
    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// The next piece; `None` when all texts have ended.
    ///
    /// # Errors
    /// A text could not be brought to its end. What comes then is of no use.
    pub(super) async fn next(&mut self) -> Option<Result<Piece>> {
        loop {
            if self.texts.iter().all(|text| text.ended) {
                return None;
            }
            let Some((index, update)) = self.answers.next().await else {
                let (status, code) = (StatusCode::SERVICE_UNAVAILABLE, "reader_too_slow");
                let message = "the answer was not read as fast as it was made, and is given up";
                return Some(Err(ApiError::new(status, code, message)));
            };
            let piece = self.take(index, update);
            if let Some(piece) = piece.transpose() {
                return Some(piece);
            }
        }
    }

    /// What an update adds to the answer.
    fn take(&mut self, index: usize, update: Update) -> Result<Option<Piece>> {
        let mut piece = Piece {
            index,
            ..Piece::default()
        };
        match update {
            Update::Started { cached } => {
                // Further texts of a prompt are the server's own doing.
                if index.is_multiple_of(self.n) {
                    self.usage.cached += cached.start;
                }
                // With log-probabilities, the prompt comes with them.
                match &self.echoes[index / self.n] {
                    Some(echo) if !self.logprobs => piece.text.clone_from(&echo.text),
                    _ => return Ok(None),
                }
            }
            Update::Prompt { logprobs } => {
                let Some(echo) = &self.echoes[index / self.n] else {
                    return Ok(None);
                };
                piece.text.clone_from(&echo.text);
                let tokens = echoed(&self.tokenizer, echo, logprobs);
                piece.tokens = tokens.map_err(|error| ApiError::failed(&error.to_string()))?;
            }
            Update::Token { id, logprob, text } => {
                self.usage.completion += 1;
                if self.logprobs {
                    let token = token(&self.tokenizer, id, logprob, self.texts[index].chars);
                    let token = token.map_err(|error| ApiError::failed(&error.to_string()))?;
                    piece.tokens.push(token);
                }
                piece.text = text;
            }
            Update::Finished { reason, text } => {
                piece.finish = Some(finish(reason)?);
                piece.text = text;
                self.texts[index].ended = true;
            }
            Update::Failed(error) => {
                let error = ApiError::of_step(&error);
                // Who runs the server must know; nobody is left to tell if this fails too.
                let _ = writeln!(io::stderr(), "error: {}", error.message);
                return Err(error);
            }
        }
        self.texts[index].chars += piece.text.chars().count();
        Ok(Some(piece))
    }
}

/// Why a text ended, in OpenAI's words.
fn finish(reason: EndReason) -> Result<&'static str> {
    match reason {
        EndReason::Stop | EndReason::StopText { .. } => Ok("stop"),
        EndReason::Length | EndReason::Positions => Ok("length"),
        EndReason::Deadline => Err(ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            "deadline_exceeded",
            "the request took longer than the server allows (--request-timeout)",
        )),
        // Nobody cancels what is still read.
        EndReason::Cancelled => Err(ApiError::failed("the request was cancelled")),
    }
}

/// The tokens of a prompt, of which all but perhaps the first have log-probabilities.
fn echoed(
    tokenizer: &Tokenizer,
    echo: &Echo,
    logprobs: Vec<TokenLogprob>,
) -> std::result::Result<Vec<Token>, TokenizerError> {
    let without = echo.ids.len().saturating_sub(logprobs.len());
    let logprobs = std::iter::repeat_n(None, without).chain(logprobs.into_iter().map(Some));
    let mut stream = TextStream::new(tokenizer);
    let mut chars = 0;
    let mut tokens = Vec::with_capacity(echo.ids.len());
    for (&id, logprob) in echo.ids.iter().zip(logprobs) {
        tokens.push(token(tokenizer, id, logprob, chars)?);
        chars += stream.push(id)?.chars().count();
    }
    Ok(tokens)
}

fn token(
    tokenizer: &Tokenizer,
    id: u32,
    known: Option<TokenLogprob>,
    offset: usize,
) -> std::result::Result<Token, TokenizerError> {
    let logprob = known.as_ref().map(|known| known.logprob);
    let likeliest = known.map(|known| known.likeliest).unwrap_or_default();
    let likeliest = likeliest.into_iter();
    let likeliest = likeliest.map(|(id, logprob)| candidate(tokenizer, id, Some(logprob)));
    Ok(Token {
        chosen: candidate(tokenizer, id, logprob)?,
        likeliest: likeliest.collect::<std::result::Result<_, _>>()?,
        offset,
    })
}

fn candidate(
    tokenizer: &Tokenizer,
    id: u32,
    logprob: Option<f32>,
) -> std::result::Result<Candidate, TokenizerError> {
    let text = tokenizer.decode(&[id])?;
    let whole = !text.contains(char::REPLACEMENT_CHARACTER);
    let bytes = if whole {
        Some(text.clone().into_bytes())
    } else {
        tokenizer.bytes(id)
    };
    let text = match &bytes {
        // As OpenAI spells what is no character alone.
        Some(bytes) if !whole && std::str::from_utf8(bytes).is_err() => {
            let spelled = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", spelled.collect::<String>())
        }
        _ => text,
    };
    Ok(Candidate {
        text,
        bytes,
        logprob: logprob.map(|logprob| logprob.max(LEAST_LOGPROB)),
    })
}
