//! Reading configurations: what is understood, what is refused, and in which words.

mod accepted;
mod changed;
mod families;
mod refused;
mod rotation;
mod variants;

use std::{error::Error, path::Path};

use deepseek_model::{Config, config::ConfigError};
use serde_json::Value;

/// The configuration of the released model, with keys a text decoder ignores.
fn release() -> Value {
    serde_json::from_str(include_str!("release.json")).unwrap()
}

fn parse(json: &Value) -> Result<Config, ConfigError> {
    Config::from_json(&json.to_string(), Path::new("config.json"))
}

/// An error and what caused it, as programs print them.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// The released configuration with `change` applied to the decoder's part.
fn changed(change: impl FnOnce(&mut Value)) -> Result<Config, ConfigError> {
    let mut json = release();
    change(&mut json["text_config"]);
    parse(&json)
}
