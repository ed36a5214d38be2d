//! The flags of `serve`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use clap::Parser;
use deepseek_model::engine::EngineOptions;
use deepseek_model::memory::{Bytes, Demand, Place, StepSize, largest_below};
use deepseek_model::tokenizer::Tokenizer;
use deepseek_model::weights::held_bytes;
use deepseek_model::{CacheError, CacheOptions, Config, Error, ModelOptions, RunnerOptions};

use super::answers::QUEUE;
use super::app::Limits;
use super::body::WHOLE;
use super::connections::{HEAD, SPARE, STALL};
use super::jinja::FUEL;
use super::linger::WHILE;
use super::params::{MAX_CHOICES, MAX_STOPS};
use super::renders::{AT_ONCE, LONGEST, MEMORY, MOST_TEXT, PER_BYTE};
use super::respond::KEEP_ALIVE;
use super::template::MOST_SOURCE;
use super::tojson::{MOST_DEPTH, MOST_VALUES};
use super::{LAST_BYTES, chat, completions};
use crate::flags::{self, Blame};
use crate::graphs::GraphArgs;
use crate::memory::MemoryArgs;
use crate::model::{BEGINNINGS, ModelArgs, PolicyArgs, blame};

/// Tokens of the KV cache for each of --max-running, unless --cache-tokens says so.
const TOKENS_EACH: usize = 4096;

/// What `--help` says behind the flags.
fn after_help() -> String {
    let times = [HEAD, WHOLE, WHILE, STALL, KEEP_ALIVE, LAST_BYTES, LONGEST];
    let [head, body, linger, stall, keep_alive, last, longest] = times.map(|time| time.as_secs());
    let (completion, chat) = (completions::MAX_LIKELIEST, chat::MAX_LIKELIEST);
    let [memory, text] = [MEMORY, MOST_TEXT].map(|bytes| bytes >> 20);
    let source = MOST_SOURCE >> 20;
    format!(
        "\
Paths:
  POST /v1/completions               prompts as texts or token ids
  POST /v1/chat/completions          conversations, by the chat template of the model
  GET  /v1/models                    the model
  GET  /health                       200 while requests are taken, else 503
  GET  /metrics                      what the server has done, for Prometheus

A request that asks for what the server cannot do is refused by the field's name, and so is one with a
field that nobody knows, or with one that comes twice; values that ask for nothing pass. The fields
user, metadata, store, service_tier, safety_identifier, prompt_cache_key, prompt_cache_retention and
parallel_tool_calls change nothing.

top_k is taken beside temperature and top_p. Where none of them is given, generation_config.json in
the model directory decides, and without one the most probable tokens are chosen. A text n of a prompt
draws by seed + n. Log-probabilities are those of the model itself, before temperature, top_k and top_p:
of the chosen tokens, and of up to {completion} (logprobs of a completion) or {chat} (top_logprobs of a chat) of
the likeliest in the place of each; with echo, those of the prompt come too.

The beginning-of-text token comes before a text by itself, and is enough of a prompt where the text is
empty; token ids are taken as they are. The spelling of a special token becomes that token, also in
messages.

{BEGINNINGS}

Limits beside those of the flags:
  connections                        {SPARE} beyond --max-connections get one answer each: that of /health
                                     and /metrics, and 503 for the rest. Others are closed
  a request's head                   comes within {head} s, also from one request to the next. What is
                                     no HTTP gets a status and no body
  a request's body                   comes within {body} s. One that is too long by its content-length
                                     is not read. Of a request that is refused before its body came,
                                     the rest is taken and forgotten for {linger} s, so that the client
                                     gets to the answer
  texts of a request                 the smaller of {MAX_CHOICES} and of --max-running and --max-waiting
                                     together: prompts times n
  stop texts of a request            {MAX_STOPS}
  chat templates                     have {source} MiB at most. They run {AT_ONCE} at a time, in a process for
                                     each conversation, and a client waits {longest} s for its own, or
                                     --request-timeout where that is less. A process that takes longer,
                                     or more memory than {memory} MiB and {PER_BYTE} bytes for each of --max-body (on
                                     Linux), is ended, and so is one whose client goes away. One makes
                                     a text of {text} MiB at most, in {FUEL} steps (an instruction, or
                                     64 bytes of a text); what it writes as JSON has {MOST_VALUES} values
                                     at most, nested {MOST_DEPTH} deep
  messages of a conversation         as many as a text may have tokens
  readers                            are given up after {stall} s in which they took nothing, or once {QUEUE}
                                     tokens of each text wait for them. A stream that has nothing to
                                     say for {keep_alive} s has a comment
  an HTTP/1.1 client                 that ends its side of the connection behind its request gets
                                     100 Continue before its answer, which tells whether it is there

SIGTERM or SIGINT: requests that run come to their ends, others are refused; a second one, or the end
of --grace, ends the program at once. Behind the last request, connections have {last} s for their last
bytes, or what is left of --grace where that is less; one that has sent half of a request is among
them. The exit status is 0 if all requests that ran came to their ends, and 1 if some were cut off or
the server could not start; 2 is for flags."
    )
}

/// Serves a DeepSeek-V4.1 decoder over HTTP, by the interface of OpenAI.
///
/// The address goes to standard output once requests are taken. Who has closed it does without, and the
/// server runs on.
#[derive(Debug, Parser)]
#[command(name = "serve", version, after_long_help = after_help())]
pub struct ServeArgs {
    /// Which model runs, and how.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Which rows are dropped.
    #[command(flatten)]
    pub policy: PolicyArgs,
    /// What the model is called in requests and answers [default: the last part of --model].
    #[arg(long, value_name = "NAME", value_parser = flags::text(not_empty), allow_hyphen_values = true)]
    pub served_model_name: Option<String>,
    /// Address to listen at; 0.0.0.0 is every one of the machine.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = flags::text(not_empty), allow_hyphen_values = true)]
    pub host: String,
    /// Port to listen at; 0 is any that is free.
    #[arg(long, value_name = "N", default_value_t = 8080, value_parser = flags::text(flags::whole::<u16>), allow_hyphen_values = true)]
    pub port: u16,
    /// What clients of the paths under /v1 must give as a bearer token [default: nothing].
    ///
    /// Other users of the machine can read command lines: the variable is for secrets.
    #[arg(long, value_name = "KEY", env = "REPLAY_API_KEY", hide_env_values = true, value_parser = flags::text(key), allow_hyphen_values = true)]
    pub api_key: Option<String>,
    /// Length of a request's body at most, 1 byte or above: 4MiB or a number of bytes, for instance.
    #[arg(long, value_name = "BYTES", default_value = "4MiB", value_parser = flags::text(body), allow_hyphen_values = true)]
    pub max_body: Bytes,
    /// Connections at a time at most, 1 or above. Beyond these, /health and /metrics answer still.
    #[arg(long, value_name = "N", default_value = "256", value_parser = flags::text(connections), allow_hyphen_values = true)]
    pub max_connections: usize,
    /// Texts that are made at a time at most, 1 or above.
    #[arg(long, value_name = "N", default_value = "16", value_parser = flags::text(flags::counting::<NonZeroUsize>), allow_hyphen_values = true)]
    pub max_running: NonZeroUsize,
    /// Texts that wait beside these at most, 1 or above; a request whose texts find no place is refused.
    #[arg(long, value_name = "N", default_value = "256", value_parser = flags::text(flags::counting::<NonZeroUsize>), allow_hyphen_values = true)]
    pub max_waiting: NonZeroUsize,
    /// Tokens that all texts in the KV cache can have together, prompts and outputs, 1 or above, rounded
    /// up to whole pages of 128 or more [default: 4096 for each of --max-running].
    #[arg(long, value_name = "N", value_parser = flags::text(flags::counting::<NonZeroUsize>), allow_hyphen_values = true)]
    pub cache_tokens: Option<NonZeroUsize>,
    /// Tokens to generate at most where a request does not say, 1 or above.
    #[arg(long, value_name = "N", default_value = "128", value_parser = flags::text(flags::counting::<NonZeroUsize>), allow_hyphen_values = true)]
    pub max_new_tokens: NonZeroUsize,
    /// Rows of a step at most, 1 or above: one for each text that is made, the rest for prompts.
    #[arg(long, value_name = "N", default_value = "2048", value_parser = flags::text(flags::counting::<NonZeroUsize>), allow_hyphen_values = true)]
    pub chunk: NonZeroUsize,
    /// Compute every prompt anew, also where another began alike; --help says how long a beginning must be
    /// to be found.
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Seconds after which a request fails, 1 or above [default: never].
    #[arg(long, value_name = "SECONDS", value_parser = flags::text(flags::counting::<NonZeroU32>), allow_hyphen_values = true)]
    pub request_timeout: Option<NonZeroU32>,
    /// Seconds that requests get to come to their ends once the program is told to end.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = flags::text(flags::whole::<u32>), allow_hyphen_values = true)]
    pub grace: u32,
    /// What it may take of its device.
    #[command(flatten)]
    pub memory: MemoryArgs,
    // The last: its heading holds for all flags that follow it.
    /// Which steps run in CUDA graphs.
    #[command(flatten)]
    pub graphs: GraphArgs,
}

impl ServeArgs {
    pub(super) fn address(&self) -> anyhow::Result<SocketAddr> {
        let flag = || format!("--host {}", self.host);
        let with_port = self.host.parse::<SocketAddr>().is_ok()
            || matches!(self.host.rsplit_once(':'), Some((name, port)) if !name.contains(':') && port.parse::<u16>().is_ok());
        ensure!(
            !with_port,
            Blame::misuse(format!(
                "{}: expected an address without a port, which --port says",
                flag()
            ))
        );
        let mut found = (self.host.as_str(), self.port)
            .to_socket_addrs()
            .with_context(flag)?;
        found
            .next()
            .ok_or_else(|| anyhow!("{}: no address", flag()))
    }

    /// What fails where the address cannot be had.
    pub(super) fn listening(&self, address: SocketAddr) -> String {
        let (host, port) = (&self.host, self.port);
        format!("--host {host}, --port {port}: cannot listen at {address}")
    }

    /// What to tell of an address that others can reach and that asks for no key.
    pub(super) fn exposed(&self, address: SocketAddr) -> Option<String> {
        let open = self.api_key.is_none() && !address.ip().is_loopback();
        open.then(|| {
            let host = &self.host;
            format!("note: --host {host}: whoever reaches it can ask; --api-key asks for a key")
        })
    }

    /// What the model is called.
    pub(super) fn name(&self) -> String {
        let dir = std::path::absolute(&self.model.model);
        let last = dir
            .ok()
            .and_then(|dir| Some(dir.file_name()?.to_string_lossy().into_owned()));
        let given = self.served_model_name.clone();
        given.or(last).unwrap_or_else(|| "model".to_owned())
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            body: usize::try_from(self.max_body.0).unwrap_or(usize::MAX),
            new_tokens: self.max_new_tokens.get(),
            texts: self
                .max_running
                .get()
                .saturating_add(self.max_waiting.get())
                .min(MAX_CHOICES),
            time: self
                .request_timeout
                .map(|seconds| Duration::from_secs(seconds.get().into())),
        }
    }

    /// The cache of so many texts at a time.
    fn cache(&self, running: usize) -> CacheOptions {
        let usual = || running.saturating_mul(TOKENS_EACH);
        CacheOptions {
            max_sequences: running,
            max_tokens: self.cache_tokens.map_or_else(usual, NonZeroUsize::get),
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: self.policy.replay,
            sampled_rows: NonZeroU32::MIN,
        }
    }

    /// What the engine is made for.
    pub(super) fn engine(&self, config: &Config, tokenizer: Arc<Tokenizer>) -> EngineOptions {
        let cache = self.cache(self.max_running.get());
        let longest = cache.max_tokens.min(config.max_positions);
        EngineOptions {
            cache,
            runner: RunnerOptions {
                max_sequence_tokens: Some(longest),
                ..self.graphs.options(false)
            },
            max_step_tokens: self.chunk,
            max_waiting: self.max_waiting.get(),
            prefix_cache: !self.no_prefix_cache,
            tokenizer: Some(tokenizer),
        }
    }

    /// What the engine takes at most.
    pub(super) fn demand<'a>(
        &self,
        config: &'a Config,
        held: &ModelOptions,
        engine: &EngineOptions,
    ) -> Demand<'a> {
        let rows = self.chunk.get();
        Demand {
            config,
            place: held.into(),
            cache: engine.cache,
            step: StepSize {
                rows,
                // A prompt that is echoed may ask for those of each row.
                logit_rows: rows,
                tokens: engine.cache.max_tokens.min(config.max_positions),
            },
            runner: engine.runner.clone(),
        }
    }

    /// Names the flag that a failure to set up is due to, and a number for it that would do. The model is not in
    /// memory, or not any more.
    pub(super) fn blame(&self, error: Error, config: &Config, place: Place) -> anyhow::Error {
        if let Some(flag) = self.graphs.to_blame(&error) {
            return anyhow::Error::from(error).context(flag);
        }
        let size = format!(
            "--max-running {}, --cache-tokens {}",
            self.max_running,
            self.cache(self.max_running.get()).max_tokens
        );
        let weights = held_bytes(config, place.dtype).ok().flatten();
        let weights = weights.unwrap_or(u64::MAX);
        let fits = |running| {
            let cache = self.cache(running);
            cache.fits_host(config, place.dtype, weights)
        };
        let running = match &error {
            Error::Cache(CacheError::TooLarge { .. }) if !place.gpu => {
                largest_below(self.max_running.get(), fits)
            }
            _ => 0,
        };
        let error = blame(error, &self.policy.flag(), &size);
        match running {
            0 => error,
            running => anyhow!("{error:#} (lower --max-running to {running})"),
        }
    }
}

fn not_empty(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected a text that is not empty".to_owned()),
        text => Ok(text.to_owned()),
    }
}

/// No request has a body of no length.
fn body(text: &str) -> Result<Bytes, String> {
    match text.parse()? {
        Bytes(0) => Err("expected 1 byte or more".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Others cannot be sent in a header; and an empty one is none, which nobody may mean.
fn key(text: &str) -> Result<String, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(text.to_owned())
    } else {
        Err(
            "expected letters, digits and signs of ASCII, 1 or more; left out, no key is asked for"
                .to_owned(),
        )
    }
}

/// More than the runtime can count are none that a machine has.
fn connections(text: &str) -> Result<usize, String> {
    let most = u16::MAX as usize;
    let number = flags::positive(text)?;
    if number <= most {
        Ok(number)
    } else {
        Err(format!("expected at most {most}"))
    }
}
