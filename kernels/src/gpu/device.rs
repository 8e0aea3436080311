//! A device and its primary context, or a part of its multiprocessors (a green context).

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};

use super::error::{DRIVER, driver};
use super::{GpuError, Library, libraries};

/// Multiprocessors that are given to a part together, as capability 9.0 has it; older ones take it as well.
const GROUP: u32 = 8;

/// Which multiprocessors of a device a model computes on. All parts of a device are cut in the same order,
/// so that they are disjoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Multiprocessors of each part but the last, which has the rest. Rounded up to multiples of 8.
    pub reserved: Vec<u32>,
    /// Which part; `reserved.len()` is the rest.
    pub part: usize,
}

/// A device whose primary context is held while any clone lives.
#[derive(Debug, Clone)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: sys::CUdevice,
    /// The primary context, or that of `part`, which shares its memory.
    context: sys::CUcontext,
    part: Option<sys::CUgreenCtx>,
    ordinal: usize,
    name: String,
    capability: (u32, u32),
    multiprocessors: u32,
    shared_memory_limit: u32,
    l2_bytes: usize,
}

// SAFETY: a context handle may be used from any thread; the driver locks inside.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing else in it changes.
unsafe impl Sync for Inner {}

impl Device {
    /// How many devices the driver shows (`CUDA_VISIBLE_DEVICES` counts).
    pub fn count() -> Result<usize, GpuError> {
        libraries::require(Library::Driver)?;
        // SAFETY: the driver is loaded; the pointer is to a local.
        unsafe {
            match sys::cuInit(0) {
                CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
                code => driver("starting", code)?,
            }
            let mut version = 0;
            driver("asking for the version", sys::cuDriverGetVersion(&mut version))?;
            let version = (version as u32 / 1000, version as u32 % 1000 / 10);
            if version < DRIVER {
                return Err(GpuError::OldDriver(version.0, version.1));
            }
            let mut count = 0;
            driver("counting devices", sys::cuDeviceGetCount(&mut count))?;
            Ok(count as usize)
        }
    }

    /// Retain the primary context of device `ordinal`, with the driver's default scheduling, and make it
    /// current on this thread.
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        Self::open_part(ordinal, None)
    }

    /// [`Self::open`]; what is enqueued computes on a part of the multiprocessors alone.
    pub fn open_part(ordinal: usize, partition: Option<&Partition>) -> Result<Self, GpuError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(GpuError::NoDevice { ordinal, count });
        }
        let mut device = 0;
        let mut context = null_mut();
        // SAFETY: pointers are to locals; the ordinal is below the count.
        unsafe {
            driver("finding the device", sys::cuDeviceGet(&mut device, ordinal as i32))?;
            driver("making a context", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        // From here on dropping it releases the context.
        let mut inner = Inner {
            device,
            context,
            part: None,
            ordinal,
            name: String::new(),
            capability: (0, 0),
            multiprocessors: 0,
            shared_memory_limit: 0,
            l2_bytes: 0,
        };
        inner.name = inner.read_name()?;
        inner.capability = (
            inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        inner.multiprocessors = inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        if let Some(partition) = partition {
            inner.enter(partition)?;
        }
        inner.shared_memory_limit =
            inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        inner.l2_bytes = inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize;
        let device = Self(Arc::new(inner));
        device.make_current()?;
        Ok(device)
    }

    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Compute capability: (major, minor).
    pub fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    /// Of the part, if this is one.
    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// Bytes of shared memory that one block can have, static and dynamic together.
    pub fn shared_memory_limit(&self) -> u32 {
        self.0.shared_memory_limit
    }

    /// Bytes of the L2 cache.
    pub fn l2_bytes(&self) -> usize {
        self.0.l2_bytes
    }

    /// Bytes of device memory: (free, total).
    pub fn memory(&self) -> Result<(usize, usize), GpuError> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: pointers are to locals.
        driver("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Bind the context to the calling thread. A thread does so once before it enqueues anything. Making
    /// and dropping things of this device does so, too: give each device a thread of its own.
    pub fn make_current(&self) -> Result<(), GpuError> {
        // SAFETY: the context is retained while `self` lives.
        driver("making the context current", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }
}

impl Inner {
    fn attribute(&self, attribute: Attribute) -> Result<u32, GpuError> {
        let mut value = 0;
        // SAFETY: the device exists; the pointer is to a local.
        driver("reading a device attribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) })?;
        Ok(value as u32)
    }

    /// Make the partition's context and take it for the device's own.
    fn enter(&mut self, partition: &Partition) -> Result<(), GpuError> {
        let mut groups = self.groups()?;
        let (mut first, mut end) = (0, groups.len());
        for (part, &count) in partition.reserved.iter().enumerate() {
            let (wanted, left) = (count.div_ceil(GROUP) as usize, end - first);
            if wanted > left {
                return Err(GpuError::Multiprocessors { asked: count, left: left as u32 * GROUP });
            }
            if part == partition.part {
                end = first + wanted;
                break;
            }
            first += wanted;
        }
        let own = &mut groups[first..end];
        if own.is_empty() {
            return Err(GpuError::Multiprocessors { asked: 1, left: 0 });
        }
        // SAFETY: every group has multiprocessors, so that this variant is there.
        self.multiprocessors = own.iter().map(|group| unsafe { group.__bindgen_anon_1.sm.smCount }).sum();
        let (mut description, mut part) = (null_mut(), null_mut());
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the groups came of one division of this device; pointers are to locals. The converted context
        // lives as long as the part.
        unsafe {
            driver("describing multiprocessors", {
                sys::cuDevResourceGenerateDesc(&mut description, own.as_mut_ptr(), own.len() as u32)
            })?;
            driver("making a part of the device", sys::cuGreenCtxCreate(&mut part, description, self.device, flags))?;
            self.part = Some(part);
            driver("entering a part of the device", sys::cuCtxFromGreenCtx(&mut self.context, part))
        }
    }

    /// All multiprocessors in groups of [`GROUP`], then what is left over, if anything. Always in the same order.
    fn groups(&self) -> Result<Vec<sys::CUdevResource>, GpuError> {
        use sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: a resource is plain data, valid when zeroed: "invalid" is its type 0.
        let (mut all, mut left): (sys::CUdevResource, sys::CUdevResource) = unsafe { std::mem::zeroed() };
        // SAFETY: the device exists; pointers are to locals.
        driver("asking for multiprocessors", unsafe {
            sys::cuDeviceGetDevResource(self.device, &mut all, CU_DEV_RESOURCE_TYPE_SM)
        })?;
        let mut count = self.multiprocessors / GROUP;
        let mut groups = vec![left; count as usize];
        // SAFETY: there is room for `count` groups; pointers are to locals.
        driver("dividing multiprocessors", unsafe {
            sys::cuDevSmResourceSplitByCount(groups.as_mut_ptr(), &mut count, &all, &mut left, 0, GROUP)
        })?;
        groups.truncate(count as usize);
        if left.type_ == CU_DEV_RESOURCE_TYPE_SM {
            groups.push(left);
        }
        Ok(groups)
    }

    fn read_name(&self) -> Result<String, GpuError> {
        let mut name = [0; 256];
        // SAFETY: the last byte is not given away, so the text ends with a NUL.
        unsafe {
            driver("reading the device's name", sys::cuDeviceGetName(name.as_mut_ptr(), 255, self.device))?;
            Ok(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(part) = self.part {
            // SAFETY: made in `enter`, once; what was made in it is gone, as it held the device.
            let _ = unsafe { sys::cuGreenCtxDestroy(part) };
        }
        // SAFETY: retained in `open`, once. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
