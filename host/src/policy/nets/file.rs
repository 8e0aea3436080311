//! Files with the weights of router networks: safetensors, or a PyTorch checkpoint.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenrouter_kernels as kernels;
use tokenrouter_plugin_api::net::{TensorInfo, WeightsInfo};

use super::torch::Checkpoint;
use crate::plain::plain;
use crate::runner::safetensors_file::SafetensorsFile;

/// Larger `.json` files beside a weights file are refused.
const MAX_METADATA: u64 = 16 << 20;

/// Most numbers of a tensor: more than any vocabulary's embeddings have.
const MOST_NUMBERS: usize = 1 << 32;

/// An open weights file.
pub struct WeightsFile {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    metadata: Map<String, Value>,
    source: Source,
}

enum Source {
    Safetensors(File),
    Torch(Checkpoint),
}

/// Where a tensor's numbers are.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub shape: Vec<usize>,
    pub kind: Kind,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Place {
    /// Offset in the file; the numbers follow each other.
    File(u64),
    /// Name of a storage, and index of the first number in it; the numbers follow each other.
    Storage(String, usize),
}

/// What the numbers are stored as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    F16,
    Bf16,
    F32,
    F64,
    /// Integers and others, which no net reads.
    Other,
}

impl Kind {
    /// Bytes of a number.
    pub(super) fn size(self) -> Option<usize> {
        match self {
            Self::F16 | Self::Bf16 => Some(2),
            Self::F32 => Some(4),
            Self::F64 => Some(8),
            Self::Other => None,
        }
    }

    fn convert(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F16 => kernels::f16_to_f32(bytes, out),
            Self::Bf16 => kernels::bf16_to_f32(bytes, out),
            Self::F32 => kernels::f32_from_le(bytes, out),
            Self::F64 => {
                let (numbers, _) = bytes.as_chunks::<8>();
                out.iter_mut().zip(numbers).for_each(|(out, &b)| *out = f64::from_le_bytes(b) as f32);
            }
            Self::Other => {}
        }
    }
}

impl WeightsFile {
    /// Open the file at `path` and read what it holds, but not the numbers. The error names the file.
    pub fn open(path: &Path) -> Result<Self, String> {
        // Names in the file and the parsers' words stand in it as they are.
        let named = |e: String| plain(&format!("router weights `{}`: {e}", path.display()));
        if !path.is_file() {
            let what = if path.exists() { "is no file" } else { "does not exist" };
            return Err(named(format!("{what}; give a .safetensors, .pt or .pth file")));
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => Self::safetensors(path),
            Some("pt" | "pth" | "bin") => Checkpoint::open(path).map(|(checkpoint, tensors, metadata)| Self {
                path: path.into(),
                tensors,
                metadata,
                source: Source::Torch(checkpoint),
            }),
            _ => Err("has an unknown kind; give a .safetensors, .pt or .pth file".into()),
        }
        .and_then(Self::with_names)
        .map_err(named)
    }

    /// Names of tensors stand in messages from here on.
    fn with_names(self) -> Result<Self, String> {
        match self.tensors.keys().find(|name| name.chars().any(char::is_control)) {
            Some(name) => Err(format!("a tensor's name {name:?} has control characters; save the router anew")),
            None => Ok(self),
        }
    }

    fn safetensors(path: &Path) -> Result<Self, String> {
        let opened = SafetensorsFile::open(path.into()).map_err(|e| e.message)?;
        let tensors = opened
            .header
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let kind = match info.dtype {
                    safetensors::Dtype::F16 => Kind::F16,
                    safetensors::Dtype::BF16 => Kind::Bf16,
                    safetensors::Dtype::F32 => Kind::F32,
                    safetensors::Dtype::F64 => Kind::F64,
                    _ => Kind::Other,
                };
                let place = Place::File(opened.data_start + info.data_offsets.0 as u64);
                (name, Tensor { shape: info.shape.clone(), kind, place })
            })
            .collect();
        let metadata = read_metadata(&path.with_extension("json"))?;
        Ok(Self { path: path.into(), tensors, metadata, source: Source::Safetensors(opened.file) })
    }

    /// What the file holds, for a policy.
    pub fn info(&self) -> WeightsInfo {
        let tensor = |(name, tensor): (&String, &Tensor)| TensorInfo {
            name: name.clone(),
            shape: tensor.shape.iter().map(|&n| n as u64).collect(),
        };
        WeightsInfo::new(self.tensors.iter().map(tensor).collect(), Value::Object(self.metadata.clone()).to_string())
    }

    /// Name of the file, without its directory.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy().into_owned()
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// Numbers of a tensor, row-major.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>, String> {
        let file = self.name();
        let Some(tensor) = self.tensors.get(name) else { return Err(format!("{file} has no tensor `{name}`")) };
        let Some(size) = tensor.kind.size() else {
            return Err(format!("tensor `{name}` of {file} holds no floating-point numbers (f16, bf16, f32, f64)"));
        };
        let failed = |e: String| format!("tensor `{name}` of {file} cannot be read: {e}");
        // A checkpoint may claim any shape: nothing is allocated before that many bytes have been read.
        let length = tensor.shape.iter().try_fold(size, |product, &n| product.checked_mul(n));
        let length = length.ok_or_else(|| failed(format!("shape {:?} is too large", tensor.shape)))?;
        // A file may be sparse, and say that it is larger than any memory.
        if length / size > MOST_NUMBERS {
            return Err(failed(format!("shape {:?} has more than {MOST_NUMBERS} numbers", tensor.shape)));
        }
        let bytes = match (&mut self.source, &tensor.place) {
            (Source::Safetensors(file), &Place::File(offset)) => read_at(file, offset, length).map_err(failed)?,
            (Source::Torch(checkpoint), Place::Storage(storage, first)) => {
                let bytes = checkpoint.storage(storage).map_err(failed)?;
                let part = first.checked_mul(size).and_then(|start| bytes.get(start..start.checked_add(length)?));
                part.ok_or_else(|| failed("it lies beyond the end of its storage".into()))?.to_vec()
            }
            _ => return Err(failed("its place is of another kind of file".into())),
        };
        let mut numbers = Vec::new();
        numbers.try_reserve_exact(length / size).map_err(|_| failed(no_memory()))?;
        numbers.resize(length / size, 0.0);
        tensor.kind.convert(&bytes, &mut numbers);
        match numbers.iter().position(|n| !n.is_finite()) {
            Some(at) => {
                Err(format!("tensor `{name}` of {file} holds {} at index {at}; train the router anew", numbers[at]))
            }
            None => Ok(numbers),
        }
    }
}

fn no_memory() -> String {
    "there is not enough memory".into()
}

fn read_at(file: &mut File, offset: u64, length: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(|_| no_memory())?;
    file.seek(SeekFrom::Start(offset)).map_err(|e| e.to_string())?;
    file.take(length as u64).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if bytes.len() == length { Ok(bytes) } else { Err("the file is cut off".into()) }
}

/// The object in the file at `path`; an empty one without such a file.
fn read_metadata(path: &Path) -> Result<Map<String, Value>, String> {
    let named = |what: String| format!("the file `{}` beside it {what}", path.display());
    if !path.exists() {
        return Ok(Map::new());
    }
    // Opening a pipe would wait for its writer.
    if !path.is_file() {
        return Err(named("is no file".into()));
    }
    let file = File::open(path).map_err(|e| named(format!("cannot be read: {e}")))?;
    let mut text = Vec::new();
    file.take(MAX_METADATA + 1).read_to_end(&mut text).map_err(|e| named(format!("cannot be read: {e}")))?;
    if text.len() as u64 > MAX_METADATA {
        return Err(named(format!("is larger than {MAX_METADATA} bytes")));
    }
    serde_json::from_slice(&text).map_err(|e| named(format!("is no JSON object: {e}")))
}
