//! How tokens are chosen: from flags, else from the checkpoint's `generation_config.json`.

use std::path::Path;

use anyhow::Context;
use deepseek_model::sampler::SamplingConfig;
use serde_json::{Map, Value};

use crate::flags;
use crate::io::{self, shown};
use crate::model::FLAG;
use crate::unfollowed::Unfollowed;
use crate::values::{count, field};

/// How tokens are chosen.
#[derive(Debug, Clone, Default, clap::Args)]
#[allow(
    clippy::doc_markdown,
    reason = "--help shows these texts as they stand"
)]
pub struct SamplingArgs {
    /// Always choose the most probable token.
    ///
    /// Without this flag and the next three, generation_config.json in the model directory decides:
    /// tokens are drawn if it has "do_sample": true, and are the most probable ones if not.
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    pub greedy: bool,
    /// Divide the logits by this before drawing; 0 is greedy [default: that of
    /// generation_config.json in the model directory, else 1].
    #[arg(long, value_name = "T", value_parser = flags::text(parse_temperature), allow_hyphen_values = true)]
    pub temperature: Option<f64>,
    /// Draw among the K most probable tokens only [default: that of generation_config.json, else
    /// all].
    #[arg(long, value_name = "K", value_parser = flags::text(flags::positive), allow_hyphen_values = true)]
    pub top_k: Option<usize>,
    /// Draw among the most probable tokens that make up this share, above 0 and at most 1 [default:
    /// that of generation_config.json, else 1].
    #[arg(long, value_name = "P", value_parser = flags::text(parse_top_p), allow_hyphen_values = true)]
    pub top_p: Option<f64>,
    /// Seed of the random choices: the same seed gives the same text.
    ///
    /// Each prompt of a batch draws from a random stream of its own, made of the seed and the
    /// prompt's number: which place it has changes what it draws, which prompts are beside it does
    /// not.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = flags::text(flags::whole::<u64>),
        allow_hyphen_values = true
    )]
    pub seed: u64,
}

/// What drawing is like where nobody says otherwise.
const PLAIN: SamplingConfig = SamplingConfig {
    temperature: 1.0,
    top_k: None,
    top_p: 1.0,
    seed: 0,
};

impl SamplingArgs {
    /// What the flags say, for the rest what the checkpoint in `dir` recommends; and what to tell of
    /// its recommendations that are not followed.
    ///
    /// # Errors
    /// `generation_config.json` is there but cannot be used.
    pub fn resolve(&self, dir: &Path) -> anyhow::Result<(SamplingConfig, Option<String>)> {
        let recommended = Recommended::load(dir)?;
        let config = self.config(&recommended);
        let note = recommended.note(dir, !config.is_greedy(), &self.decided());
        Ok((config, note))
    }

    /// The recommendations that the flags leave no say.
    pub(crate) fn decided(&self) -> Vec<&'static str> {
        let flags = [
            ("temperature", self.temperature.is_some()),
            ("top_k", self.top_k.is_some()),
            ("top_p", self.top_p.is_some()),
        ];
        let mut keys: Vec<_> = flags
            .iter()
            .filter(|(_, given)| *given)
            .map(|(key, _)| *key)
            .collect();
        if self.greedy || !keys.is_empty() {
            keys.push("do_sample");
        }
        keys
    }

    /// What the flags say, for the rest what is recommended.
    pub(crate) fn config(&self, recommended: &Recommended) -> SamplingConfig {
        let asked = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some();
        if self.greedy || !(asked || recommended.do_sample) {
            return SamplingConfig {
                seed: self.seed,
                ..SamplingConfig::GREEDY
            };
        }
        SamplingConfig {
            temperature: self
                .temperature
                .or(recommended.temperature)
                .unwrap_or(PLAIN.temperature),
            top_k: self.top_k.or(recommended.top_k),
            top_p: self.top_p.or(recommended.top_p).unwrap_or(PLAIN.top_p),
            seed: self.seed,
        }
    }
}

const FILE_NAME: &str = "generation_config.json";

/// `generation_config.json`, as far as it concerns sampling.
#[derive(Debug, Default)]
pub(crate) struct Recommended {
    do_sample: bool,
    temperature: Option<f64>,
    /// 0 stands for all tokens there.
    top_k: Option<usize>,
    top_p: Option<f64>,
    /// Of its other keys, and of `config.json`.
    unfollowed: [(&'static str, Unfollowed); 2],
}

impl Recommended {
    /// What to tell of recommendations that are not followed, where tokens are drawn or not, but for those
    /// that are [decided](SamplingArgs::decided): a line for each file that has some.
    pub(crate) fn note(&self, dir: &Path, drawn: bool, decided: &[&str]) -> Option<String> {
        let files = self.unfollowed.iter();
        let notes = files.filter_map(|(name, keys)| keys.note(&dir.join(name), drawn, decided));
        let notes: Vec<String> = notes.collect();
        (!notes.is_empty()).then(|| notes.join("\n"))
    }

    /// # Errors
    /// `generation_config.json` is there but cannot be used; names the flag that led there.
    pub(crate) fn load(dir: &Path) -> anyhow::Result<Self> {
        Self::read(dir).context(FLAG)
    }

    fn read(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join(FILE_NAME);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => b"{}".to_vec(),
            Err(error) => return Err(error).with_context(|| shown(&path)),
        };
        let parse = || {
            let json = bytes.strip_prefix(io::BYTE_ORDER_MARK).unwrap_or(&bytes);
            let fields: Map<String, Value> = serde_json::from_slice(json)?;
            let file = Self {
                do_sample: field(&fields, "do_sample", "true or false", Value::as_bool)?
                    .unwrap_or(false),
                temperature: field(&fields, "temperature", "a number", Value::as_f64)?,
                top_k: count(&fields, "top_k", 0)?.filter(|k| *k > 0),
                top_p: field(&fields, "top_p", "a number", Value::as_f64)?,
                unfollowed: [
                    (FILE_NAME, Unfollowed::of_recommendations(&fields)),
                    ("config.json", Unfollowed::of_config(dir, &fields)),
                ],
            };
            let config = SamplingConfig {
                temperature: file.temperature.unwrap_or(PLAIN.temperature),
                top_p: file.top_p.unwrap_or(PLAIN.top_p),
                ..PLAIN
            };
            config.validate()?;
            anyhow::Ok(file)
        };
        parse().with_context(|| shown(&path))
    }
}

fn parse_temperature(text: &str) -> Result<f64, String> {
    check(parse_number(text)?, |temperature| SamplingConfig {
        temperature,
        ..PLAIN
    })
}

fn parse_top_p(text: &str) -> Result<f64, String> {
    check(parse_number(text)?, |top_p| SamplingConfig {
        top_p,
        ..PLAIN
    })
}

fn parse_number(text: &str) -> Result<f64, String> {
    text.parse()
        .map_err(|_| "expected a number, such as 0.7".to_owned())
}

/// Lets the sampler judge a number.
fn check(number: f64, config: impl FnOnce(f64) -> SamplingConfig) -> Result<f64, String> {
    config(number)
        .validate()
        .map_err(|error| error.to_string())?;
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What flags mean beside a file of this content.
    fn resolve(flags: &SamplingArgs, file: Option<&str>) -> anyhow::Result<SamplingConfig> {
        let dir = tempfile::tempdir().unwrap();
        if let Some(file) = file {
            std::fs::write(dir.path().join("generation_config.json"), file).unwrap();
        }
        Ok(flags.resolve(dir.path())?.0)
    }

    const FILE: &str = r#"{"do_sample": true, "temperature": 0.7, "top_k": 40, "eos_token_id": 1}"#;

    #[test]
    fn without_flags_the_file_decides() {
        let none = SamplingArgs::default();
        let drawn = SamplingConfig {
            temperature: 0.7,
            top_k: Some(40),
            ..PLAIN
        };
        assert_eq!(resolve(&none, Some(FILE)).unwrap(), drawn);
        assert_eq!(resolve(&none, None).unwrap(), SamplingConfig::GREEDY);
        let silent = r#"{"temperature": 0.7}"#;
        assert_eq!(
            resolve(&none, Some(silent)).unwrap(),
            SamplingConfig::GREEDY
        );
    }

    #[test]
    fn a_field_that_cannot_be_used_is_named() {
        let refuse = |file| {
            let error = resolve(&SamplingArgs::default(), Some(file)).unwrap_err();
            let text = format!("{error:#}");
            let (flag, file) = text.split_at(text.find("generation_config").unwrap());
            assert!(flag.starts_with("--model: "), "{text}");
            file.to_owned()
        };
        insta::assert_snapshot!(refuse(r#"{"top_k": -1}"#), @"generation_config.json: top_k: expected a whole number, 0 or above, got -1");
        insta::assert_snapshot!(refuse(r#"{"do_sample": "yes"}"#), @r#"generation_config.json: do_sample: expected true or false, got "yes""#);
        insta::assert_snapshot!(refuse(r#"{"temperature": []}"#), @"generation_config.json: temperature: expected a number, got []");
        insta::assert_snapshot!(refuse(r#"{"top_k": 50.0}"#), @"generation_config.json: top_k: expected a whole number, 0 or above, got 50.0");
        let null = r#"{"do_sample": null, "top_k": null}"#;
        let greedy = resolve(&SamplingArgs::default(), Some(null)).unwrap();
        assert_eq!(greedy, SamplingConfig::GREEDY);
    }

    #[test]
    fn flags_win_over_the_file() {
        let greedy = SamplingArgs {
            greedy: true,
            seed: 5,
            ..Default::default()
        };
        assert!(resolve(&greedy, Some(FILE)).unwrap().is_greedy());
        let flags = SamplingArgs {
            top_p: Some(0.5),
            top_k: Some(3),
            seed: 9,
            ..Default::default()
        };
        assert_eq!(
            resolve(&flags, Some(FILE)).unwrap(),
            SamplingConfig {
                temperature: 0.7,
                top_k: Some(3),
                top_p: 0.5,
                seed: 9
            }
        );
        let alone = SamplingArgs {
            top_k: Some(3),
            ..Default::default()
        };
        assert_eq!(
            resolve(&alone, None).unwrap(),
            SamplingConfig {
                top_k: Some(3),
                ..PLAIN
            }
        );
    }

    #[test]
    fn a_top_k_of_0_in_the_file_means_all() {
        let config = resolve(
            &SamplingArgs::default(),
            Some(r#"{"do_sample": true, "top_k": 0}"#),
        );
        assert_eq!(config.unwrap(), PLAIN);
    }

    /// Who copied a file with a penalty expects texts that keep to it.
    #[test]
    fn recommendations_that_are_not_followed_are_told() {
        let note = |flags: &SamplingArgs, file: &str| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("generation_config.json"), file).unwrap();
            let note = flags.resolve(dir.path()).unwrap().1?;
            Some(note.replace(dir.path().to_str().unwrap(), "DIR"))
        };
        let drawn = SamplingArgs {
            temperature: Some(0.7),
            ..Default::default()
        };
        let file = r#"{"repetition_penalty": 1.5, "min_p": 0.1, "num_beams": 4}"#;
        insta::assert_snapshot!(note(&drawn, file).unwrap(), @"note: DIR/generation_config.json asks for repetition_penalty 1.5, num_beams 4, min_p 0.1, which is not followed");
        insta::assert_snapshot!(note(&SamplingArgs::default(), file).unwrap(), @"note: DIR/generation_config.json asks for repetition_penalty 1.5, num_beams 4, which is not followed");
        let lists = r#"{"suppress_tokens": [5], "min_new_tokens": 3}"#;
        insta::assert_snapshot!(note(&drawn, lists).unwrap(), @"note: DIR/generation_config.json asks for suppress_tokens [5], min_new_tokens 3, which is not followed");
        let raw = "{\"repetition_penalty\": \"\u{9b}31m\u{7f}\"}";
        insta::assert_snapshot!(note(&drawn, raw).unwrap(), @r#"note: DIR/generation_config.json asks for repetition_penalty "\u{9b}31m\u{7f}", which is not followed"#);
        let plain = r#"{"repetition_penalty": 1.0, "min_p": 0, "num_beams": 1, "typical_p": null,
            "stop_strings": [], "stop_token_ids": [], "watermarking_config": {}, "token_healing": false,
            "max_length": 20, "max_new_tokens": null, "max_time": null, "dola_layers": "",
            "num_beam_groups": 1, "min_tokens": 0, "max_tokens": null, "logit_bias": {}, "repeat_penalty": 1,
            "top_n_sigma": -1, "top_a": 0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
            "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2}"#;
        assert_eq!(note(&drawn, plain), None);
        let released = r#"{"_from_model_config": true, "bos_token_id": 0, "eos_token_id": 1,
            "do_sample": true, "temperature": 1.0, "top_p": 1.0, "transformers_version": "4.46.3"}"#;
        assert_eq!(note(&SamplingArgs::default(), released), None);
        let ends = r#"{"max_new_tokens": 64, "max_length": 4096, "max_time": 0.5, "stop_token_ids": [7],
            "watermarking_config": {"bias": 2.5}, "token_healing": true, "dola_layers": "high"}"#;
        insta::assert_snapshot!(note(&SamplingArgs::default(), ends).unwrap(), @r#"note: DIR/generation_config.json asks for dola_layers "high", token_healing true, watermarking_config {"bias":2.5}, stop_token_ids [7], max_length 4096, max_new_tokens 64, max_time 0.5, which is not followed"#);
    }

    /// Keys of other samplers. Those that only say how, as `mirostat_tau`, are not told.
    #[test]
    fn keys_of_other_samplers_are_told() {
        let recommended: Map<String, Value> = serde_json::from_str(
            r#"{"num_beam_groups": 2, "min_tokens": 8, "max_tokens": 64, "logit_bias": {"5": -100},
                "repeat_penalty": 1.1, "top_n_sigma": 1.5, "top_a": 0.2, "mirostat": 2, "mirostat_tau": 5.0,
                "dry_multiplier": 0.8, "dry_base": 1.75}"#,
        )
        .unwrap();
        let keys = Unfollowed::of_recommendations(&recommended);
        let note = |drawn| keys.note(Path::new(FILE_NAME), drawn, &[]).unwrap();
        insta::assert_snapshot!(note(true), @r#"note: generation_config.json asks for num_beam_groups 2, repeat_penalty 1.1, logit_bias {"5":-100}, min_tokens 8, max_tokens 64, dry_multiplier 0.8, top_n_sigma 1.5, top_a 0.2, mirostat 2, which is not followed"#);
        insta::assert_snapshot!(note(false), @r#"note: generation_config.json asks for num_beam_groups 2, repeat_penalty 1.1, logit_bias {"5":-100}, min_tokens 8, max_tokens 64, dry_multiplier 0.8, which is not followed"#);
    }

    /// Old checkpoints have them in `config.json`, where nothing is followed; the library writes its
    /// defaults there.
    #[test]
    fn recommendations_in_the_configuration_are_told() {
        let note = |config: &str, recommended: Option<&str>, flags: &SamplingArgs| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            if let Some(recommended) = recommended {
                std::fs::write(dir.path().join(FILE_NAME), recommended).unwrap();
            }
            let note = flags.resolve(dir.path()).unwrap().1?;
            Some(note.replace(dir.path().to_str().unwrap(), "DIR"))
        };
        let none = SamplingArgs::default();
        let drawn = SamplingArgs {
            top_k: Some(3),
            ..none.clone()
        };
        let old = r#"{"do_sample": true, "temperature": 0.6, "top_k": 40, "max_length": 4096,
            "text_config": {"repetition_penalty": 1.2, "suppress_tokens": [5], "num_beams": 4}}"#;
        insta::assert_snapshot!(note(old, None, &none).unwrap(), @"note: DIR/config.json asks for do_sample true, repetition_penalty 1.2, suppress_tokens [5], max_length 4096, num_beams 4, which is not followed");
        insta::assert_snapshot!(note(old, None, &drawn).unwrap(), @"note: DIR/config.json asks for temperature 0.6, repetition_penalty 1.2, suppress_tokens [5], max_length 4096, num_beams 4, which is not followed");
        let recommended = r#"{"do_sample": true, "temperature": 0.9, "top_k": 0, "repetition_penalty": 1.1,
            "num_beams": 1, "suppress_tokens": [], "max_length": 20}"#;
        insta::assert_snapshot!(note(old, Some(recommended), &none).unwrap(), @"note: DIR/generation_config.json asks for repetition_penalty 1.1, which is not followed");
        let defaults = r#"{"do_sample": false, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_beams": 1,
            "repetition_penalty": 1.0, "max_length": 20, "min_length": 0, "num_beam_groups": 1,
            "typical_p": 1.0, "suppress_tokens": null, "bad_words_ids": null, "forced_eos_token_id": null,
            "early_stopping": false, "length_penalty": 1.0, "num_return_sequences": 1}"#;
        assert_eq!(note(defaults, None, &drawn), None);
        // What cannot be read is refused where the model is loaded.
        assert_eq!(note("{", None, &drawn), None);
    }

    #[test]
    fn a_bad_file_is_named() {
        for file in ["{", r#"{"top_p": 2}"#, r#"{"temperature": "warm"}"#] {
            let error = resolve(&SamplingArgs::default(), Some(file)).unwrap_err();
            let named = format!("{error:#}");
            assert!(named.contains("generation_config.json: "), "{named}");
        }
    }

    #[test]
    fn flags_outside_their_range_are_refused() {
        assert_eq!(parse_top_p("1"), Ok(1.0));
        insta::assert_snapshot!(parse_top_p("1.5").unwrap_err(), @"top_p is 1.5: expected above 0 and at most 1");
        insta::assert_snapshot!(parse_temperature("-1").unwrap_err(), @"temperature is -1: expected a finite number, 0 (greedy) or above");
        insta::assert_snapshot!(parse_temperature("hot").unwrap_err(), @"expected a number, such as 0.7");
        insta::assert_snapshot!(flags::positive("0").unwrap_err(), @"expected a whole number, 1 or more");
    }
}
