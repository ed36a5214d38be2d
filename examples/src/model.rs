//! Flags that say which model runs and how.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow, bail, ensure};
use candle_core::{DType, Device};
use deepseek_model::memory::Bytes;
use deepseek_model::sampler::SamplerError;
use deepseek_model::tokenizer::{Tokenizer, TokenizerError};
use deepseek_model::{
    CacheError, Config, Error, Model, ModelError, ModelOptions, ReplayPolicy, StepError, device,
};

use crate::{count, flags, io, progress};

/// Which model runs, and how it computes.
#[derive(Debug, Clone, clap::Args)]
pub struct ModelArgs {
    /// Directory of the checkpoint: config.json, tokenizer.json and safetensors files.
    ///
    /// A relative path starts at the current directory. The safetensors files are memory-mapped:
    /// while the program runs they must not be truncated or overwritten, which would end it with
    /// SIGBUS or change what it computes. A file that is replaced under its name (mv) does no harm.
    #[arg(
        long,
        value_name = "DIR",
        default_value = "models/v41-demo",
        allow_hyphen_values = true
    )]
    pub model: PathBuf,
    /// Where the model runs: cpu, or cuda:N for GPU number N, of which cuda is the first (in a build with
    /// the feature cuda).
    #[arg(
        long,
        value_name = "DEVICE",
        default_value_t = DeviceArg::Cpu,
        value_parser = flags::text(str::parse::<DeviceArg>),
        allow_hyphen_values = true
    )]
    pub device: DeviceArg,
    /// Type of activations: f32 is the clean reference, bf16 as released. Without the flag, f32 on
    /// the CPU and bf16 on a GPU.
    #[arg(long, value_enum, allow_hyphen_values = true)]
    pub dtype: Option<DTypeArg>,
    /// Keep cached values as they are, instead of rounding them to the formats of the released
    /// cache.
    #[arg(long)]
    pub no_activation_rounding: bool,
}

/// The flag that names the checkpoint.
pub(crate) const FLAG: &str = "--model";

/// The flag of a checkpoint that loads well and makes what is no number. No file is to blame alone: large
/// weights and a large factor do it together.
const OVERFLOWS: &str =
    "--model: numbers of config.json or the weights are too large to compute with";

/// Which rows of a prompt are dropped.
#[derive(Debug, Clone, clap::Args)]
pub struct PolicyArgs {
    /// Which prompt rows the later layers run on: off (all), step-tail (the last of each chunk),
    /// prompt-tail (the last of the prompt) or exact (as many as it takes to change nothing but last bits).
    ///
    /// The last are those of a window of the model, of which there are 32 in the demo model: step-tail
    /// drops nothing from chunks up to that, and prompt-tail nothing from prompts up to that. exact runs in
    /// the last layer only the rows that are read, and a window less one more in each layer before it: it
    /// drops some of a short prompt, too. On a GPU, chunks below --trim-threshold drop nothing in
    /// piecewise graphs; what they are answered stays the same.
    #[arg(
        long,
        value_name = "POLICY",
        default_value_t = ReplayPolicy::PromptTail,
        value_parser = flags::text(str::parse::<ReplayPolicy>),
        allow_hyphen_values = true
    )]
    pub replay: ReplayPolicy,
}

/// What `--help` says of prompts that begin alike, in programs with a cache for those.
pub(crate) const BEGINNINGS: &str = "\
A prompt that begins as another did takes that over from the KV cache, as long as there is room for it
there: in whole pages of 128 tokens (more, where the compression ratios of the model ask for it), and
never its last token. Window KV is not kept, so some of these rows are computed again; a beginning that
has no more of them is computed as a whole. With W for sliding_window of config.json (32 in the demo
model), L for its layers and C for those before the last that writes long-range KV, they are
  step-tail, prompt-tail             W
  off                                L (W - 1)
  exact                              C (W - 1), and at least the last L (W - 1) + 1 of the prompt";

impl PolicyArgs {
    /// The flag as a failure names it.
    pub(crate) fn flag(&self) -> String {
        format!("--replay {} (off runs every model)", self.replay)
    }
}

/// A failure of the model, with the flag that is to blame: `policy`, which chose the replay policy, if
/// the model cannot replay, `size` if there is too little memory, and that of the model if it makes what is
/// no number.
pub(crate) fn blame(error: Error, policy: &str, size: &str) -> anyhow::Error {
    if error.is_out_of_device_memory() {
        return anyhow::Error::from(error).context(format!(
            "{size}: the GPU has no memory left (other programs on it take some, too)"
        ));
    }
    let flag = match &error {
        // Its own words are the fields that the flags become.
        Error::Cache(CacheError::TooLarge {
            bytes,
            shortage,
            max_sequences,
            max_tokens,
            fits,
        }) => {
            let sequences = count(*max_sequences, "sequence");
            let tokens = match fits {
                0 => format!("with {sequences} none"),
                fits => tokens_of(*fits),
            };
            let needs = match bytes {
                Some(bytes) => {
                    let bytes = Bytes(*bytes);
                    format!("{bytes} of memory, {shortage}; {tokens} would fit")
                }
                None => format!("more rows or bytes than can be addressed; {tokens} could be"),
            };
            let cache = format!("{} in {sequences}", tokens_of(*max_tokens));
            return anyhow!("{size}: a KV cache of {cache} needs {needs}");
        }
        Error::Unsupported(_) => Some(policy),
        Error::Step(StepError::Memory { .. }) => Some(size),
        Error::Model(ModelError::NotFinite { .. } | ModelError::NotFiniteOnDevice { .. })
        | Error::Sampler(SamplerError::BadLogit { .. } | SamplerError::NothingAllowed { .. }) => {
            Some(OVERFLOWS)
        }
        // A table's rows are looked at when they are read.
        Error::Weights(_) => Some("--model"),
        _ => None,
    };
    if let (Error::Step(StepError::Memory { fits, .. }), Some(flag)) = (&error, flag)
        && *fits > 0
    {
        return anyhow!("{flag}: {error} (lower --chunk to {fits})");
    }
    let (flag, error) = (flag.map(str::to_owned), anyhow::Error::from(error));
    match flag {
        Some(flag) => error.context(flag),
        None => error,
    }
}

/// A number of tokens as a flag takes it, without separators.
fn tokens_of(tokens: usize) -> String {
    let s = if tokens == 1 { "" } else { "s" };
    format!("{tokens} token{s}")
}

/// An error that a text of this `source` met, with the flag that is to blame: of tokenizer.json, that of
/// the model.
pub(crate) fn blame_text(error: anyhow::Error, source: &dyn fmt::Display) -> anyhow::Error {
    let tokenizer = error.downcast_ref::<TokenizerError>();
    let context = if tokenizer.is_some_and(TokenizerError::is_of_the_file) {
        format!("{FLAG}, on {source}")
    } else {
        source.to_string()
    };
    error.context(context)
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceArg {
    /// The host.
    Cpu,
    /// A GPU, by number; the first, if none is given.
    Cuda(Option<usize>),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected cpu, cuda or cuda:N, N the number of a GPU".to_owned();
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(None)),
            // One spelling of each: neither a sign nor zeros before it.
            Some(("cuda", text)) => match text.parse() {
                Ok(number) if text == format!("{number}") => Ok(Self::Cuda(Some(number))),
                _ => Err(expected()),
            },
            _ => Err(expected()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceArg {
    /// # Errors
    /// If the program cannot use that GPU.
    fn open(self) -> anyhow::Result<Device> {
        let Self::Cuda(number) = self else {
            return Ok(Device::Cpu);
        };
        device::open_cuda(number.unwrap_or(0)).with_context(|| format!("--device {self}"))
    }
}

/// `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DTypeArg {
    /// Single precision.
    F32,
    /// Brain floating point, as released.
    Bf16,
}

/// The small files of a checkpoint, read before its weights so that bad input fails at once.
#[derive(Debug)]
pub struct Checkpoint {
    /// `config.json`.
    pub config: Config,
    /// `tokenizer.json`.
    pub tokenizer: Tokenizer,
}

impl ModelArgs {
    /// Reads the configuration and the tokenizer.
    ///
    /// # Errors
    /// Names the directory or the file.
    pub fn checkpoint(&self) -> anyhow::Result<Checkpoint> {
        let dir = self.dir()?;
        // The errors name the file, but not the flag that led there.
        let config = Config::load(dir).context(FLAG)?;
        let tokenizer = Tokenizer::load(dir).context(FLAG)?;
        tokenizer.check_fits(config.vocab_size).context(FLAG)?;
        Ok(Checkpoint { config, tokenizer })
    }

    /// Opens the device, and says how the model is held there.
    ///
    /// # Errors
    /// Names the flag.
    pub fn options(&self) -> anyhow::Result<ModelOptions> {
        Ok(ModelOptions {
            device: self.device.open()?,
            dtype: self.dtype(),
            round_cache: !self.no_activation_rounding,
        })
    }

    /// Type of activations.
    pub(crate) fn dtype(&self) -> DType {
        match (self.dtype, self.device) {
            (Some(DTypeArg::F32), _) | (None, DeviceArg::Cpu) => DType::F32,
            (Some(DTypeArg::Bf16), _) | (None, DeviceArg::Cuda(_)) => DType::BF16,
        }
    }

    /// Loads the model, behind a progress bar if someone watches.
    ///
    /// # Errors
    /// Names the file or the tensor.
    pub fn load(&self, options: ModelOptions, watched: bool) -> anyhow::Result<Model> {
        let bar = progress::loading(watched);
        let model = Model::load(self.dir()?, options, &|progress| {
            bar.set_length(progress.bytes_total as u64);
            bar.set_position(progress.bytes_done as u64);
        });
        bar.finish_and_clear();
        model.context(FLAG)
    }

    fn dir(&self) -> anyhow::Result<&Path> {
        let (dir, at) = (io::shown(&self.model), io::absolute(&self.model));
        let at = at.map_or_else(String::new, |at| format!(" at {at}"));
        let got = match self.model.metadata() {
            Ok(entry) if entry.is_dir() => None,
            Ok(_) => Some(format!("got a file{at}")),
            Err(error) if self.model.is_symlink() => Some(match self.model.read_link() {
                Ok(target) if error.kind() == ErrorKind::NotFound => {
                    let target = io::shown(&target);
                    format!("got a link{at} to {target}, which is not there")
                }
                _ => format!("got a link{at} that leads nowhere: {error}"),
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Some(format!("there is none{at}")),
            Err(error) => Some(format!("cannot look{at}: {error}")),
        };
        if let Some(got) = got {
            bail!("--model {dir}: expected a directory, {got}");
        }
        for file in ["config.json", "tokenizer.json"] {
            let missing = self.model.join(file).symlink_metadata();
            let missing = missing.is_err_and(|error| error.kind() == ErrorKind::NotFound);
            ensure!(
                !missing,
                "--model {dir}: expected a checkpoint, there is no {file}{at}"
            );
        }
        Ok(&self.model)
    }
}

#[cfg(test)]
mod tests {
    use deepseek_model::memory::Shortage;

    use super::*;

    #[test]
    fn devices_by_name() {
        assert_eq!("cpu".parse(), Ok(DeviceArg::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceArg::Cuda(None)));
        assert_eq!("cuda:3".parse(), Ok(DeviceArg::Cuda(Some(3))));
        for name in [
            "", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:+0", "cuda:00", "cuda:01", "cpu:0",
        ] {
            assert!(name.parse::<DeviceArg>().is_err(), "{name:?}");
        }
        for name in ["cpu", "cuda", "cuda:0", "cuda:3"] {
            let device: DeviceArg = name.parse().unwrap();
            assert_eq!(device.to_string(), name, "echoed as it was given");
        }
    }

    #[test]
    fn a_flag_is_blamed_for_what_it_can_change() {
        let text = |error| format!("{:#}", blame(error, "--replay exact", "--chunk 8192"));
        insta::assert_snapshot!(
            text(deepseek_model::sampler::SamplerError::TopK.into()),
            @"top_k is 0: expected 1 or above, or none for all tokens"
        );
        insta::assert_snapshot!(
            text(replay_core::Unsupported::NoKvSource.into()),
            @"--replay exact: no replay: the model has no KV-source layer"
        );
        let full = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)".to_owned());
        insta::assert_snapshot!(
            text(full.into()),
            @"--chunk 8192: the GPU has no memory left (other programs on it take some, too): DriverError(CUDA_ERROR_OUT_OF_MEMORY)"
        );
        let available = Some(6000);
        let memory = StepError::Memory {
            rows: 8192,
            bytes: 9000,
            shortage: Shortage { available },
            fits: 5461,
        };
        insta::assert_snapshot!(
            text(memory.into()),
            @"--chunk 8192: step: 8192 rows take about 8.8 KiB of memory, expected at most the 5.9 KiB that are available; 5461 rows would fit (lower --chunk to 5461)"
        );
    }

    /// Of the cache, that is: the flag is one of several things that make it large.
    #[test]
    fn a_cache_that_is_too_large_is_told_with_what_would_fit() {
        let text = |bytes, fits| {
            let shortage = Shortage {
                available: Some(1 << 30),
            };
            let error = CacheError::TooLarge {
                bytes,
                shortage,
                max_sequences: 1,
                max_tokens: 70_000,
                fits,
            };
            format!(
                "{:#}",
                blame(error.into(), "--replay exact", "--contexts 70000")
            )
        };
        insta::assert_snapshot!(text(Some(3 << 30), 30_208), @"--contexts 70000: a KV cache of 70000 tokens in 1 sequence needs 3 GiB of memory, expected at most the 1 GiB that are available; 30208 tokens would fit");
        insta::assert_snapshot!(text(None, 30_208), @"--contexts 70000: a KV cache of 70000 tokens in 1 sequence needs more rows or bytes than can be addressed; 30208 tokens could be");
        insta::assert_snapshot!(text(None, 0), @"--contexts 70000: a KV cache of 70000 tokens in 1 sequence needs more rows or bytes than can be addressed; with 1 sequence none could be");
    }

    #[test]
    fn a_missing_directory_is_named_with_its_flag() {
        let refuse = |model: &Path| {
            let args = ModelArgs {
                model: model.to_owned(),
                device: DeviceArg::Cpu,
                dtype: None,
                no_activation_rounding: false,
            };
            args.checkpoint().unwrap_err().to_string()
        };
        let here = std::env::current_dir().unwrap().display().to_string();
        insta::assert_snapshot!(refuse(Path::new("no/such/place")).replace(&here, "HERE"), @"--model no/such/place: expected a directory, there is none at HERE/no/such/place");
        insta::assert_snapshot!(refuse(Path::new("/no/such/place")), @"--model /no/such/place: expected a directory, there is none");
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        insta::assert_snapshot!(refuse(file.path()).replace(&path, "FILE"), @"--model FILE: expected a directory, got a file");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().display().to_string();
        #[cfg(unix)]
        {
            let link = |name: &str, to| {
                std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
                refuse(&dir.path().join(name)).replace(&path, "DIR")
            };
            insta::assert_snapshot!(link("dangling", "no/such/place"), @"--model DIR/dangling: expected a directory, got a link to no/such/place, which is not there");
            // What follows is the system's own wording.
            let start = "--model DIR/loop: expected a directory, got a link that leads nowhere: ";
            let refused = link("loop", "loop");
            assert!(refused.starts_with(start), "{refused}");
        }
        insta::assert_snapshot!(refuse(dir.path()).replace(&path, "DIR"), @"--model DIR: expected a checkpoint, there is no config.json");
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        insta::assert_snapshot!(refuse(dir.path()).replace(&path, "DIR"), @"--model DIR: expected a checkpoint, there is no tokenizer.json");
    }
}
