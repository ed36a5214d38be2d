//! Bounds of a configuration in hand: its fields are public, so it need not be the one that was
//! read.

use super::{
    Config, ConfigError, LayerSchedule, Violation,
    fields::{MAX_COUNT, MAX_WIDTH},
    raw::{MAX_LAYERS, MAX_NGRAM},
};

impl Config {
    /// Whether shapes and the schedule can be computed with: no product of sizes overflows, no
    /// division is by 0, and every layer that another names is there. [`Config::load`] has checked
    /// all this and more, but a caller may have changed a field since.
    ///
    /// # Errors
    /// The first field that is out of bounds.
    pub(crate) fn check_bounds(&self) -> Result<(), ConfigError> {
        let window = replay_core::Window::MAX as usize;
        for (field, value, max) in [
            ("vocab_size", self.vocab_size, MAX_WIDTH),
            ("hidden_size", self.hidden_size, MAX_WIDTH),
            ("head_dim", self.head_dim, MAX_WIDTH),
            ("q_lora_rank", self.q_lora_rank, MAX_WIDTH),
            ("o_lora_rank", self.o_lora_rank, MAX_WIDTH),
            (
                "moe_intermediate_size",
                self.moe_intermediate_size,
                MAX_WIDTH,
            ),
            ("index_dim", self.index_dim, MAX_WIDTH),
            ("max_positions", self.max_positions, MAX_WIDTH),
            ("sliding_window", self.sliding_window, window),
            ("num_heads", self.num_heads, MAX_COUNT),
            ("o_groups", self.o_groups, MAX_COUNT),
            ("num_experts", self.num_experts, MAX_COUNT),
            ("hc_mult", self.hc_mult, MAX_COUNT),
            ("index_heads", self.index_heads, MAX_COUNT),
            ("layers.len()", self.layers.len(), MAX_LAYERS),
        ] {
            within(field, value, 1..=max)?;
        }
        if let Some(engram) = &self.engram {
            within("engram.max_ngram", engram.max_ngram, 2..=MAX_NGRAM)?;
            within("engram.heads", engram.heads, 1..=MAX_COUNT)?;
            within("engram.head_dim", engram.head_dim, 1..=MAX_WIDTH)?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            self.check_layer(index, layer)?;
        }
        Ok(())
    }

    fn check_layer(&self, index: usize, layer: &LayerSchedule) -> Result<(), ConfigError> {
        let field = |name: &str| format!("layers[{index}].{name}");
        let least = usize::from(layer.kv_source.is_some());
        within(&field("ratio"), layer.ratio, least..=MAX_WIDTH)?;
        for (name, source) in [
            ("kv_source", layer.kv_source),
            ("index_source", layer.index_source),
        ] {
            within(&field(name), source.unwrap_or(0), 0..=index)?;
        }
        let tables = self.engram.as_ref().map_or(0, |e| e.table_rows.len());
        if let Some(table) = layer.engram.filter(|&table| table >= tables) {
            let expected = format!("below the {tables} tables of engram.table_rows");
            return Err(changed(&field("engram"), expected, table));
        }
        Ok(())
    }
}

fn within(
    field: &str,
    value: usize,
    bounds: std::ops::RangeInclusive<usize>,
) -> Result<(), ConfigError> {
    if bounds.contains(&value) {
        return Ok(());
    }
    let expected = format!("{} to {}", bounds.start(), bounds.end());
    Err(changed(field, expected, value))
}

fn changed(field: &str, expected: String, found: usize) -> ConfigError {
    ConfigError::Changed(Violation::new(field, expected, found))
}
