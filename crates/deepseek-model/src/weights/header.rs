//! Says what is wrong with a safetensors file that the `safetensors` crate refuses.
//!
//! Its errors name the first offence, and for most not the tensor. The header is short, so it is
//! read again here, entry by entry; only after a refusal.

use safetensors::{Dtype, SafeTensorError, tensor::TensorInfo};
use serde_json::{Map, Value};

use super::{error::Problem, shard::LENGTH_BYTES};

/// The problems of `file`, whose content `bytes` was refused with `error`.
pub(super) fn diagnose(file: &str, bytes: &[u8], error: &SafeTensorError) -> Vec<Problem> {
    let entries = bad_entries(file, bytes).unwrap_or_default();
    if !entries.is_empty() {
        return entries;
    }
    vec![Problem::File {
        file: file.into(),
        reason: reason(bytes, error),
    }]
}

fn reason(bytes: &[u8], error: &SafeTensorError) -> String {
    let len = bytes.len();
    match error {
        _ if bytes.is_empty() => "the file is empty".to_owned(),
        SafeTensorError::HeaderTooSmall => {
            format!("{len} bytes are too few for a safetensors file; is it truncated?")
        }
        SafeTensorError::InvalidHeaderLength | SafeTensorError::HeaderTooLarge => format!(
            "no safetensors file, or truncated: announces a header of {} bytes, has {len} in all",
            header_len(bytes).unwrap_or_default()
        ),
        SafeTensorError::MetadataIncompleteBuffer => match expected_len(bytes) {
            Some(expected) if expected > len => {
                format!("truncated: the header lists {expected} bytes, the file has {len}")
            }
            Some(expected) => format!("the header lists {expected} bytes, the file has {len}"),
            None => error.to_string(),
        },
        other => other.to_string(),
    }
}

fn header_len(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.first_chunk::<LENGTH_BYTES>()?))
}

fn header(bytes: &[u8]) -> Option<Map<String, Value>> {
    let len = usize::try_from(header_len(bytes)?).ok()?;
    serde_json::from_slice(bytes.get(LENGTH_BYTES..)?.get(..len)?).ok()
}

/// Entries of tensors, by name.
fn entries(header: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    header.iter().filter(|(name, _)| *name != "__metadata__")
}

/// Length of the whole file according to its header.
fn expected_len(bytes: &[u8]) -> Option<usize> {
    let end = entries(&header(bytes)?)
        .filter_map(|(_, entry)| entry["data_offsets"][1].as_u64())
        .max()?;
    usize::try_from(end + header_len(bytes)?)
        .ok()?
        .checked_add(LENGTH_BYTES)
}

/// Every entry that is wrong in itself; none if the header is no JSON object.
fn bad_entries(file: &str, bytes: &[u8]) -> Option<Vec<Problem>> {
    let header = header(bytes)?;
    let mut problems = Vec::new();
    let mut spans = Vec::new();
    for (tensor, entry) in entries(&header) {
        match read_entry(entry) {
            Ok(span) => spans.push((span, tensor)),
            Err(reason) => problems.push(entry_problem(tensor, file, reason)),
        }
    }
    if problems.is_empty() {
        // The format wants the tensors to follow each other without gap or overlap.
        spans.sort_unstable();
        let mut end = 0;
        for ((from, to), tensor) in spans {
            if from != end {
                let reason = format!("starts at byte {from}, the tensor before it ends at {end}");
                problems.push(entry_problem(tensor, file, reason));
            }
            end = to;
        }
    }
    Some(problems)
}

fn entry_problem(tensor: &str, file: &str, reason: String) -> Problem {
    Problem::HeaderEntry {
        tensor: tensor.into(),
        file: file.into(),
        reason,
    }
}

/// The span of an entry's bytes, or why the entry is bad.
fn read_entry(entry: &Value) -> Result<(usize, usize), String> {
    let dtype = &entry["dtype"];
    if dtype.is_string() && serde_json::from_value::<Dtype>(dtype.clone()).is_err() {
        return Err(format!("unknown dtype {dtype}"));
    }
    let info: TensorInfo = serde_json::from_value(entry.clone()).map_err(|e| e.to_string())?;
    let (from, to) = info.data_offsets;
    let span = to.checked_sub(from);
    let span = span.ok_or_else(|| format!("ends at byte {to}, before its start at {from}"))?;

    let (dtype, shape) = (info.dtype, &info.shape);
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &n| bits.checked_mul(n))
        .ok_or_else(|| format!("{dtype} of shape {shape:?} exceeds any memory"))?;
    if bits % 8 != 0 {
        return Err(format!(
            "{dtype} of shape {shape:?} does not fill whole bytes"
        ));
    }
    if bits / 8 != span {
        let bytes = bits / 8;
        return Err(format!(
            "{dtype} of shape {shape:?} takes {bytes} bytes, not {span}"
        ));
    }
    Ok((from, to))
}
