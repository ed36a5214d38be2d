//! Resolves the id lists into what each layer does.

use super::{LayerSchedule, Violation, check, raw::Raw};

const KV: &str = "kv_source_layer_ids";
const INDEX: &str = "index_source_layer_ids";
const RATIOS: &str = "compress_ratios";

/// The schedule of layers 0 to `num_hidden_layers - 1`.
///
/// `compress_ratios` may be longer (draft layers follow the decoder's) or shorter (0 then); an id
/// list may not name a layer that is not there. Returns `None` if a list could not be read; broken
/// rules are noted in `violations`.
pub(super) fn resolve(raw: &Raw, violations: &mut Vec<Violation>) -> Option<Vec<LayerSchedule>> {
    let layers = raw.num_layers?;
    let (ratios, kv, index) = (
        raw.compress_ratios.as_ref()?,
        raw.kv_sources.as_ref()?,
        raw.index_sources.as_ref()?,
    );
    let mut too_long = raw
        .engram
        .as_ref()
        .is_some_and(|engram| engram.layers.len() > layers);
    for (field, ids) in [(KV, kv), (INDEX, index)] {
        if ids.len() > layers {
            violations.push(check::overlong(field, layers, ids.len()));
            too_long = true;
            continue;
        }
        for &id in ids.iter().filter(|&&id| id >= layers) {
            violations.push(check::below_layers(field, layers, id));
        }
        violations.extend(check::descending(field, ids));
    }

    if too_long {
        return None;
    }

    let mut schedule = Vec::with_capacity(layers);
    let (mut kv_source, mut index_source) = (None, None);
    for layer in 0..layers {
        let ratio = ratios.get(layer).copied().unwrap_or(0);
        let (is_kv, is_index) = (kv.contains(&layer), index.contains(&layer));
        source_rules(layer, ratio, is_kv, is_index, violations);
        // A layer that breaks a rule still counts as the source it claims to be, so that one
        // mistake is reported once and not again for every layer after it.
        kv_source = if is_kv { Some(layer) } else { kv_source };
        index_source = if is_index || is_kv {
            Some(layer)
        } else {
            index_source
        };
        let tables = raw.engram.as_ref().map_or(&[][..], |engram| &engram.layers);
        schedule.push(LayerSchedule {
            ratio,
            kv_source: kv_source.filter(|_| ratio > 0),
            index_source: index_source.filter(|_| ratio > 0),
            engram: tables.iter().position(|&id| id == layer),
        });
    }
    reader_rules(&schedule, violations);
    candidate_rules(raw, kv, &schedule, violations);
    Some(schedule)
}

fn source_rules(
    layer: usize,
    ratio: usize,
    is_kv: bool,
    is_index: bool,
    violations: &mut Vec<Violation>,
) {
    if ratio == 0 && (is_kv || is_index) {
        let field = if is_kv { KV } else { INDEX };
        let expected = "layers whose compress_ratios entry is above 0";
        let found = format!("layer {layer} with ratio 0");
        violations.push(Violation::new(field, expected, found));
    }
    if is_kv && !is_index {
        let expected = format!("every layer of {KV}");
        violations.push(Violation::new(INDEX, expected, format!("no layer {layer}")));
    }
}

/// A layer with compressed KV has a source, of its own ratio. Neighbours that miss the same source
/// are reported as one.
fn reader_rules(schedule: &[LayerSchedule], violations: &mut Vec<Violation>) {
    let source_ratio = |layer: &LayerSchedule| layer.kv_source.map(|id| schedule[id].ratio);
    let wrong: Vec<(usize, &LayerSchedule)> = schedule
        .iter()
        .enumerate()
        .filter(|(_, layer)| layer.ratio > 0 && source_ratio(layer) != Some(layer.ratio))
        .collect();
    let alike = |(i, a): &(usize, &LayerSchedule), (j, b): &(usize, &LayerSchedule)| {
        i + 1 == *j && (a.kv_source, a.ratio) == (b.kv_source, b.ratio)
    };
    for run in wrong.chunk_by(alike) {
        let (first, layer) = run[0];
        let layers = match run.len() {
            1 => format!("layer {first}"),
            more => format!("layers {first} to {}", first + more - 1),
        };
        violations.push(if let Some(source) = layer.kv_source {
            let ratio = schedule[source].ratio;
            let expected = format!("the ratio of KV source {source} ({ratio}) at {layers}");
            Violation::new(RATIOS, expected, layer.ratio)
        } else {
            let expected = "a source at or before the first layer with a ratio above 0";
            let found = format!("none for {layers} (ratio {})", layer.ratio);
            Violation::new(KV, expected, found)
        });
    }
}

/// The blocks number the entries of the source's compressed KV, so the source must own them, and
/// later choices must be among entries that are numbered alike.
fn candidate_rules(
    raw: &Raw,
    kv: &[usize],
    schedule: &[LayerSchedule],
    violations: &mut Vec<Violation>,
) {
    let Some(source) = raw.candidates.map(|c| c.source) else {
        return;
    };
    let field = "candidate_source_layer_id";
    if !kv.contains(&source) || source >= schedule.len() {
        violations.push(Violation::new(
            field,
            format!("a layer of {KV} {kv:?}"),
            source,
        ));
        return;
    }
    let ratio = schedule[source].ratio;
    if let Some(later) =
        (source..schedule.len()).find(|&l| ![0, ratio].contains(&schedule[l].ratio))
    {
        violations.push(Violation::new(
            field,
            format!("no later layer with another ratio than the source's ({ratio})"),
            format!(
                "{source}, and layer {later} with ratio {}",
                schedule[later].ratio
            ),
        ));
    }
}
