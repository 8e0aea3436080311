//! cublasLt's descriptors, owned.

use std::ffi::{c_int, c_void};
use std::ptr::{from_ref, null_mut};

use cudarc::cublaslt::sys::{self, cudaDataType_t as DataType};
use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;

use super::GpuError;
use super::error::blas;

/// Destroyed when it is dropped.
#[derive(Debug)]
pub struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A dense column-major matrix.
    pub fn new(data: DataType, rows: u64, columns: u64) -> Result<Self, GpuError> {
        let mut raw = null_mut();
        // SAFETY: the pointer is to a local.
        blas("describing a matrix", unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut raw, data, rows, columns, rows as i64)
        })?;
        Ok(Self(raw))
    }

    pub fn raw(&self) -> sys::cublasLtMatrixLayout_t {
        self.0
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once. A failure leaves nothing to do.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// Destroyed when it is dropped.
#[derive(Debug)]
pub struct Operation(sys::cublasLtMatmulDesc_t);

/// `CUBLAS_OP_T` of cublas_api.h, a C enum.
const TRANSPOSED: c_int = 1;

impl Operation {
    /// D = Aᵀ B + beta C, summed in f32.
    pub fn new() -> Result<Self, GpuError> {
        let mut raw = null_mut();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: the pointer is to a local.
        blas("describing a product", unsafe {
            sys::cublasLtMatmulDescCreate(&mut raw, compute, DataType::CUDA_R_32F)
        })?;
        let operation = Self(raw);
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let (value, size) = bytes(&TRANSPOSED);
        // SAFETY: the attribute has the value's type.
        blas("describing a product", unsafe {
            sys::cublasLtMatmulDescSetAttribute(operation.0, attribute, value, size)
        })?;
        Ok(operation)
    }

    pub fn raw(&self) -> sys::cublasLtMatmulDesc_t {
        self.0
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once. A failure leaves nothing to do.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// Destroyed when it is dropped.
pub struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    /// Algorithms that need at most `workspace` bytes, take matrices aligned to `alignment` bytes, and add
    /// up partial sums in f32.
    pub fn new(workspace: usize, alignment: u32) -> Result<Self, GpuError> {
        let mut raw = null_mut();
        // SAFETY: the pointer is to a local.
        blas("making a preference", unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) })?;
        let preference = Self(raw);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, &alignment)?;
        }
        Ok(preference)
    }

    fn set<T>(&self, attribute: Attribute, value: &T) -> Result<(), GpuError> {
        let (value, size) = bytes(value);
        // SAFETY: `new` passes each attribute's type; cublasLt checks the size.
        blas("setting a preference", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value, size)
        })
    }

    pub fn raw(&self) -> sys::cublasLtMatmulPreference_t {
        self.0
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once. A failure leaves nothing to do.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

fn bytes<T>(value: &T) -> (*const c_void, usize) {
    (from_ref(value).cast(), size_of::<T>())
}
